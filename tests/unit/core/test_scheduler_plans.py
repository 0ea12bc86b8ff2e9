"""Which tokens go into a plan: budget, chunks, microbatches."""

import pytest

from tests.unit.core.replica_model import Replica, Sizes, lengths, slots, tokens


def test_a_prompt_is_computed_sampled_and_decoded() -> None:
    replica = Replica(Sizes())
    key = replica.add(tokens(6), max_tokens=2)
    prefill = replica.schedule()
    (step,) = prefill.steps
    assert (step.start, step.token_ids, step.sample) == (0, tokens(6), True)
    assert len(step.new_block_ids) == 2
    replica.apply()
    (step,) = replica.schedule().steps
    assert (step.start, step.token_ids) == (6, (replica.clients[key].output[0],))
    assert step.new_block_ids == ()
    replica.apply()
    assert replica.clients[key].finish_reason == "length"


def test_chunks_of_one_prefill_are_in_flight_together() -> None:
    replica = Replica(Sizes(num_stages=3, max_num_batched_tokens=8))
    replica.add(tokens(20))
    plans = [replica.schedule() for _ in range(3)]
    assert [(p.steps[0].start, p.num_tokens, p.steps[0].sample) for p in plans] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]
    assert [len(plan.new_slots) for plan in plans] == [1, 0, 0]
    replica.drain()


@pytest.mark.parametrize(
    ("num_stages", "num_prompts", "chunks"),
    [
        (1, 1, [2048, 952]),
        (2, 1, [751, 563, 422, 317, 257, 257, 257, 176]),
        (2, 4, [2048, 2048, 1978, 1483, 1112]),
        (4, 1, [376, 329, 287, 257, 257]),
    ],
)
def test_a_pipeline_computes_what_is_left_in_smaller_chunks(
    num_stages: int, num_prompts: int, chunks: list[int]
) -> None:
    sizes = Sizes(
        num_blocks=4000,
        num_slots=4,
        num_stages=num_stages,
        max_num_batched_tokens=2048,
        max_model_len=3100,
    )
    replica = Replica(sizes)
    for first in range(num_prompts):
        replica.add(tokens(3000, first))
    found = []
    while len(found) < len(chunks):
        if not replica.has_room:
            replica.apply()
        found.append(replica.schedule().num_tokens)
    assert found == chunks
    replica.drain()


def test_decodes_leave_a_pipelines_chunk_its_tokens() -> None:
    replica = Replica(
        Sizes(
            num_stages=2, num_slots=4, max_num_batched_tokens=512, num_blocks=200, max_model_len=600
        )
    )
    for first in range(3):
        replica.add(tokens(4, first))
    replica.schedule()
    replica.apply()
    replica.add(tokens(400))
    plan = replica.schedule()
    assert sum(lengths(plan).values()) == 2 + 256
    replica.drain()


def test_decodes_take_budget_before_prefill_chunks() -> None:
    replica = Replica(Sizes(max_num_batched_tokens=8))
    replica.add(tokens(4))
    replica.add(tokens(4, first=5))
    replica.schedule()
    replica.apply()
    replica.add(tokens(20, first=1), priority=-1)
    assert lengths(replica.schedule()) == {0: 1, 1: 1, 2: 6}
    replica.apply()
    replica.add(tokens(20, first=2), priority=-2)  # runs later, but goes before the older prefill
    assert lengths(replica.schedule()) == {0: 1, 1: 1, 2: 6}
    replica.drain()


def test_prefills_share_the_rest_by_priority_then_arrival() -> None:
    replica = Replica(Sizes(max_num_batched_tokens=8))
    for priority in (1, 0, 0):
        replica.add(tokens(6, first=priority), priority=priority, max_tokens=1)
    plan = replica.schedule()
    assert [new.params.seed for new in plan.new_slots] == [1, 2]
    assert lengths(plan) == {0: 6, 1: 2}
    replica.drain()


def test_two_stages_alternate_two_halves() -> None:
    replica = Replica(Sizes(num_stages=2))
    for first in range(4):
        replica.add(tokens(4, first), max_tokens=6)
    assert [slots(replica.schedule()), slots(replica.schedule())] == [{0, 1}, {2, 3}]
    for half in ({0, 1}, {2, 3}, {0, 1}, {2, 3}):
        replica.apply()
        assert slots(replica.schedule()) == half
    replica.drain()


@pytest.mark.parametrize(("num_stages", "microbatches"), [(2, [{0, 1}, {2, 3}]), (3, [{0}, {1}])])
def test_least_recently_scheduled_first(num_stages: int, microbatches: list[set[int]]) -> None:
    """With async scheduling more requests are ready than a plan takes."""
    replica = Replica(Sizes(num_stages=num_stages, async_scheduling=True))
    for first in range(sum(map(len, microbatches))):
        replica.add(tokens(4, first), max_tokens=20)
    for microbatch in microbatches * 4:
        if len(replica.in_flight) == 3:
            replica.apply()
        assert slots(replica.schedule()) == microbatch
    replica.drain()


def test_running_requests_do_not_fill_every_microbatch() -> None:
    """Three decoding requests, two stages, three plans in flight: a fourth still enters at once."""
    replica = Replica(Sizes(num_stages=2, async_scheduling=True))
    for first in range(3):
        replica.add(tokens(4, first), max_tokens=40)
    for _ in range(12):
        if not replica.has_room:
            replica.apply()
        replica.schedule()
    replica.add(tokens(4, first=7), max_tokens=40)
    replica.apply()
    assert [new.slot for new in replica.schedule().new_slots] == [3]
    replica.drain()
