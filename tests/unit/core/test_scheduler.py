"""One test per rule; `test_scheduler_machine.py` mixes them."""

import pytest

from aioengine.core.blocks import BlockPool
from aioengine.core.scheduler import Scheduler
from aioengine.messages import (
    PREV,
    AddRequest,
    ChoiceParams,
    Sampled,
    StepResult,
    TokenLogprobs,
)
from tests.unit.core.device_model import expected_output
from tests.unit.core.replica_model import Replica, Sizes, lengths, slots, tokens

# --- PREV ---------------------------------------------------------------------------------------


def test_async_scheduling_goes_one_token_ahead() -> None:
    replica = Replica(Sizes(num_stages=2, async_scheduling=True))
    replica.add(tokens(4), max_tokens=3)
    first, second, third = (replica.schedule() for _ in range(3))
    assert first.share_sampled
    assert second.steps[0].token_ids == (PREV,)
    assert third.is_empty  # two samples in flight are the most
    replica.apply()
    third = replica.schedule()
    assert third.steps[0].token_ids == (PREV,)
    assert not third.share_sampled  # its token is the last one
    replica.drain()


def test_literals_return_when_nothing_is_in_flight() -> None:
    replica = Replica(Sizes(async_scheduling=True))
    key = replica.add(tokens(4))
    replica.schedule()
    replica.apply()
    assert replica.schedule().steps[0].token_ids == tuple(replica.clients[key].output)


def test_without_async_scheduling_there_is_no_prev() -> None:
    replica = Replica(Sizes(num_stages=2))
    replica.add(tokens(4), max_tokens=3)
    assert not replica.schedule().share_sampled
    assert replica.schedule().is_empty


@pytest.mark.parametrize("max_model_len", [6, 64])
def test_lengths_are_never_over_run(max_model_len: int) -> None:
    replica = Replica(Sizes(async_scheduling=True, max_model_len=max_model_len))
    key = replica.add(tokens(4), max_tokens=2 if max_model_len == 64 else 10)
    assert replica.drain() == 2
    assert len(replica.clients[key].output) == 2
    assert replica.clients[key].finish_reason == "length"


# --- endings ------------------------------------------------------------------------------------


def test_a_stop_token_ends_after_min_tokens_and_is_reported() -> None:
    output, _ = expected_output(
        AddRequest(request_id="", token_ids=tokens(4), params=ChoiceParams(max_tokens=8)), 64
    )
    for min_tokens in (0, 1, 3):
        replica = Replica(Sizes(async_scheduling=True))
        key = replica.add(
            tokens(4), max_tokens=8, stop_token_ids=(output[0], output[2]), min_tokens=min_tokens
        )
        replica.drain()
        assert tuple(replica.clients[key].output) == output[: 3 if min_tokens == 3 else 1]
        assert replica.clients[key].finish_reason == "stop"


def test_tokens_after_the_end_are_dropped() -> None:
    replica = Replica(Sizes())
    replica.add(tokens(4), max_tokens=2)
    replica.schedule()
    logprobs = tuple(TokenLogprobs(-float(token_id)) for token_id in (1, 2, 3))
    result = StepResult(7, (Sampled(0, 1, (1, 2, 3), logprobs),))
    ((_, delta),) = replica.scheduler.apply(result)
    assert (delta.token_ids, delta.logprobs) == ((1, 2), logprobs[:2])
    assert delta.finish_reason == "length"
    assert replica.scheduler.stats().last_seq == 7


def test_late_results_do_not_reach_the_next_tenant_of_a_slot() -> None:
    replica = Replica(Sizes(num_stages=2, async_scheduling=True))
    aborted = replica.add(tokens(4), max_tokens=8)
    replica.schedule()
    replica.schedule()
    replica.abort(aborted)
    heir = replica.add(tokens(5, first=6), max_tokens=8)
    plan = replica.schedule()
    assert plan.new_slots[0].slot == 0
    assert replica.apply() == replica.apply() == []
    replica.drain()
    assert replica.clients[heir].finish_reason == "length"


def test_abort_frees_at_once_and_unknown_ids_are_ignored() -> None:
    replica = Replica(Sizes())
    key = replica.add(tokens(9))
    waiting = replica.add(tokens(9), source="other")
    replica.schedule()
    for aborted in (key, key, waiting, ("api", "never seen")):
        replica.scheduler.abort(*aborted)
    stats = replica.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert replica.scheduler.num_unfinished == 0


def test_sources_have_ids_of_their_own() -> None:
    replica = Replica(Sizes())
    lost, kept = replica.add(tokens(4), source="a"), replica.add(tokens(5), source="b")
    assert lost[1] == kept[1]
    replica.schedule()
    replica.abort_source("a")
    replica.drain()
    assert replica.clients[kept].finish_reason == "length"
    assert replica.clients[lost].output == []


def test_unusable_logits_end_one_request() -> None:
    replica = Replica(Sizes())
    bad, good = replica.add(tokens(4)), replica.add(tokens(5))
    replica.schedule()
    replica.apply(error_row=0)
    assert replica.clients[bad].finish_reason == "error"
    replica.drain()
    assert replica.clients[good].finish_reason == "length"


def test_a_failed_plan_ends_its_requests_and_the_others_start_over() -> None:
    replica = Replica(Sizes(async_scheduling=True, max_num_batched_tokens=8))
    failed = replica.add(tokens(8))
    replica.schedule(fails=True)
    later = replica.add(tokens(9))  # finds the prefix that the failed plan should have written
    assert replica.schedule().steps[-1].start == 4 * 2
    ((source, delta),) = replica.apply()
    assert (source, delta.request_id) == failed
    assert (delta.finish_reason, delta.error) == ("error", "device error")
    assert replica.apply() == []
    assert replica.schedule().steps[0].start == 0
    replica.drain()
    assert replica.clients[later].finish_reason == "length"


def test_fail_all_ends_running_and_waiting() -> None:
    replica = Replica(Sizes(num_slots=1))
    keys = [replica.add(tokens(4)), replica.add(tokens(4))]
    replica.schedule()
    replica.receive(replica.scheduler.fail_all("rank 1 is gone"))
    assert {replica.clients[key].finish_reason for key in keys} == {"error"}
    assert replica.apply() == []
    replica.drain()


# --- prefix reuse -------------------------------------------------------------------------------


def test_a_full_hit_recomputes_the_last_token() -> None:
    replica = Replica(Sizes())
    replica.add(tokens(8), max_tokens=1)
    replica.drain()
    replica.add(tokens(8), max_tokens=1)
    (step,) = replica.schedule().steps
    assert (step.start, len(step.token_ids), len(step.new_block_ids)) == (4, 4, 2)
    ((_, delta),) = replica.apply()
    assert delta.num_cached_tokens == 4
    stats = replica.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 4)
    assert stats.num_cached_blocks == 2


def test_prompts_of_one_plan_share_and_output_is_reused() -> None:
    replica = Replica(Sizes())
    first = replica.add(tokens(9), max_tokens=8)
    replica.add(tokens(9), max_tokens=1)
    plan = replica.schedule()
    assert [step.start for step in plan.steps] == [0, 8]
    assert plan.steps[0].new_block_ids[:2] == plan.steps[1].new_block_ids[:2]
    replica.drain()
    replica.add(tokens(9) + tuple(replica.clients[first].output), max_tokens=1)
    assert replica.schedule().steps[0].start == 16


def test_blocks_filled_by_prev_are_reused_once_known() -> None:
    """8 tokens are computed; when the plan of the last one is made, it is still in flight."""
    replica = Replica(Sizes(async_scheduling=True))
    first = replica.add(tokens(4), max_tokens=5)
    replica.drain()
    replica.add(tokens(4) + tuple(replica.clients[first].output), max_tokens=1)
    assert replica.schedule().steps[0].start == 8


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_salts_and_the_switch_separate(enable_prefix_caching: bool) -> None:
    replica = Replica(Sizes(enable_prefix_caching=enable_prefix_caching))
    replica.add(tokens(9), cache_salt="a" if enable_prefix_caching else "b")
    replica.add(tokens(9), cache_salt="b")
    assert [step.start for step in replica.schedule().steps] == [0, 0]
    replica.drain()
    assert replica.scheduler.stats().prefix_cache_hits == 0


def test_weight_versions_separate() -> None:
    replica = Replica(Sizes())
    replica.add(tokens(9), max_tokens=1)
    replica.drain()
    replica.scheduler.weight_version += 1
    replica.add(tokens(9), max_tokens=1)
    assert replica.schedule().steps[0].start == 0


# --- admission and preemption -------------------------------------------------------------------


def test_the_lowest_slot_is_taken() -> None:
    replica = Replica(Sizes(async_scheduling=True))
    keys = [replica.add(tokens(4, first)) for first in range(3)]
    replica.schedule()
    replica.abort(keys[1])
    replica.abort(keys[0])
    replica.add(tokens(4))
    assert [new.slot for new in replica.schedule().new_slots] == [0]


def test_admission_leaves_the_blocks_that_running_prefills_still_need() -> None:
    """9 blocks: the first prefill needs 6 (20 tokens and the next), so 4 more are not there."""
    replica = Replica(Sizes(num_blocks=10, max_model_len=36, max_num_batched_tokens=9))
    replica.add(tokens(20), max_tokens=2)
    replica.schedule()
    replica.apply()
    replica.add(tokens(15, first=1), max_tokens=1)
    replica.add(tokens(2), max_tokens=1)  # would fit, but nobody overtakes
    assert slots(replica.schedule()) == {0}
    replica.apply()
    assert lengths(replica.schedule()) == {0: 2}
    replica.apply()
    assert lengths(replica.schedule()) == {0: 1}
    replica.apply()
    assert [new.params.seed for new in replica.schedule().new_slots] == [1]
    replica.drain()
    assert replica.scheduler.stats().num_preemptions == 0


def test_admissions_of_one_plan_leave_each_other_their_blocks() -> None:
    """7 blocks. 3 of the first request's 6 are allocated in its first plan, all 6 are counted."""
    replica = Replica(Sizes(num_blocks=8, max_model_len=28, max_num_batched_tokens=22))
    replica.add(tokens(20), max_tokens=2)
    replica.add(tokens(6, first=3), max_tokens=1)
    assert slots(replica.schedule()) == {0}
    replica.drain()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_fills_the_context_gets_one_token(async_scheduling: bool) -> None:
    """Which is never computed, so that no block is wanted for it: here there is none."""
    sizes = Sizes(num_blocks=7, max_model_len=24, async_scheduling=async_scheduling)
    replica = Replica(sizes)
    key = replica.add(tokens(24), max_tokens=5, prompt_logprobs=0)
    replica.drain()
    client = replica.clients[key]
    assert (len(client.output), client.finish_reason) == (1, "length")
    assert len(client.prompt_logprobs) == 23


def test_admission_counts_hits_on_free_blocks() -> None:
    """4 blocks, 2 of them cached and free: 3 tokens more do not make the hit free of charge."""
    replica = Replica(Sizes(num_blocks=5, max_model_len=16))
    replica.add(tokens(8), max_tokens=1)
    replica.drain()
    replica.add(tokens(7, first=4), max_tokens=4)  # 2 blocks now, a third soon
    replica.schedule()
    replica.apply()
    replica.add((*tokens(8), 1), max_tokens=1)  # 2 hits and 1 more
    assert slots(replica.schedule()) == {0}
    replica.drain()


def test_the_worst_running_request_is_preempted_and_returns_to_its_place() -> None:
    """6 blocks, three requests with 2. When the best needs a third, the youngest one goes."""
    replica = Replica(Sizes(num_blocks=7, max_model_len=24))
    for prompt, priority in ((tokens(4), 1), (tokens(6, 1), 0), (tokens(6, 2), 1)):
        replica.add(prompt, max_tokens=6, priority=priority)
    assert [new.params.seed for new in replica.schedule().new_slots] == [1, 0, 2]
    for _ in range(2):
        replica.apply()
        assert slots(replica.schedule()) == {0, 1, 2}
    replica.apply()
    for priority in (1, 0):
        replica.add(tokens(1), max_tokens=1, priority=priority)
    plan = replica.schedule()
    assert slots(plan) == {0, 1}
    assert plan.new_slots == ()  # a block is free, but nobody enters a plan that had to preempt
    assert replica.scheduler.stats().num_preemptions == 1
    entered = []
    while len(entered) < 3:
        replica.apply()
        entered += [new.params.seed for new in replica.schedule().new_slots]
    assert entered == [4, 2, 3]
    replica.drain()
    assert all(client.finish_reason == "length" for client in replica.clients.values())


def test_samples_in_flight_of_a_preempted_request_are_drawn_again() -> None:
    replica = Replica(Sizes(num_blocks=5, max_model_len=16, async_scheduling=True))
    best = replica.add(tokens(7), max_tokens=9)
    worst = replica.add(tokens(7, first=3), max_tokens=9)
    replica.schedule()
    replica.schedule()
    replica.apply()
    assert slots(replica.schedule()) == {0}
    assert replica.scheduler.stats().num_preemptions == 1
    ((_, delta),) = replica.apply()  # of the plan that both were in
    assert delta.request_id == best[1]
    assert len(replica.clients[worst].output) == 1
    replica.drain()
    assert len(replica.clients[worst].output) == 9


def two_in_stages(num_stages: int, num_best: int, num_worst: int) -> Replica:
    """4 blocks, 2 for each of two requests; the worse one is the less recently scheduled."""
    replica = Replica(Sizes(num_blocks=5, max_model_len=16, num_stages=num_stages))
    replica.add(tokens(num_worst), max_tokens=8, priority=1)
    replica.schedule()
    replica.add(tokens(num_best, first=3), max_tokens=8)
    replica.schedule()
    for _ in range(2):
        replica.apply()
        replica.schedule()
    replica.apply()
    replica.apply()
    return replica


@pytest.mark.parametrize("num_stages", [2, 3])
def test_who_finds_no_block_leaves_its_place_to_another(num_stages: int) -> None:
    replica = two_in_stages(num_stages, num_best=5, num_worst=7)
    assert slots(replica.schedule()) == {1}
    assert replica.scheduler.stats().num_preemptions == 0
    replica.drain()


def test_who_is_in_the_plan_is_not_preempted() -> None:
    """A third request could enter, so a plan has two places; it does not fit."""
    replica = two_in_stages(2, num_best=7, num_worst=5)
    replica.add(tokens(8), max_tokens=1, priority=2)
    assert slots(replica.schedule()) == {0}
    assert slots(replica.schedule()) == {1}
    assert replica.scheduler.stats().num_preemptions == 1
    replica.drain()


def test_the_best_gets_blocks_first_even_a_prefill() -> None:
    """5 blocks. The worse request, decoding, has taken the one that the prefill ends in."""
    replica = Replica(Sizes(num_blocks=6, max_model_len=20, num_slots=2, max_num_batched_tokens=4))
    replica.add(tokens(1), max_tokens=9, priority=1)
    replica.schedule()
    replica.apply()
    replica.add(tokens(15, first=5), max_tokens=1)
    for _ in range(4):
        assert lengths(replica.schedule()) == {0: 1, 1: 3}
        replica.apply()
    assert lengths(replica.schedule()) == {1: 3}
    replica.drain()


def test_sizes_that_cannot_work_are_refused() -> None:
    for num_blocks, num_slots in ((4, 8), (5, 9)):
        with pytest.raises(AssertionError):
            Scheduler(
                BlockPool(num_blocks, 4, enable_prefix_caching=True),
                num_slots=num_slots,
                num_stages=1,
                max_num_batched_tokens=8,
                max_model_len=16,
                async_scheduling=True,
            )
