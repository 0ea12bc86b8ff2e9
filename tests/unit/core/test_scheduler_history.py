"""What the scheduler sends for penalties and prompt log probabilities, case by case."""

from tests.unit.core.replica_model import Replica, Sizes

PROMPT = tuple(i % 11 for i in range(40))


def test_the_tokens_of_a_hit_travel_as_history() -> None:
    replica = Replica(Sizes(max_model_len=128, max_num_batched_tokens=64))
    replica.add(PROMPT)
    replica.drain()
    replica.add(PROMPT, presence_penalty=0.5)
    replica.add(PROMPT)
    plan = replica.schedule()
    penalised, _ = plan.new_slots
    (history,) = plan.history
    assert (history.slot, history.epoch) == (penalised.slot, penalised.epoch)
    assert history.token_ids == PROMPT[:36]
    assert [step.start for step in plan.steps] == [36, 36]
    assert plan.without_history().history == ()
    assert plan.without_history().steps == plan.steps
    replica.drain()


def test_history_is_cut_to_the_budget_of_a_plan() -> None:
    """The second request gets what the first left, the third nothing: they compute the rest."""
    replica = Replica(Sizes(max_model_len=128, max_num_batched_tokens=50))
    replica.add(PROMPT)
    replica.drain()
    for _ in range(3):
        replica.add(PROMPT, repetition_penalty=1.5)
    plan = replica.schedule()
    assert [len(part.token_ids) for part in plan.history] == [36, 12]
    assert [step.start for step in plan.steps] == [36, 12, 0]
    replica.drain()


def test_prompt_logprobs_compute_every_token() -> None:
    """In chunks, each with the token after it; the blocks serve others."""
    replica = Replica(Sizes(max_model_len=128, max_num_batched_tokens=16))
    replica.add(PROMPT)
    replica.drain()
    key = replica.add(PROMPT, prompt_logprobs=2)
    steps = []
    while not replica.clients[key].output:
        steps += replica.schedule().steps
        replica.apply()
    assert [(step.start, step.next_prompt_id) for step in steps] == [
        (0, PROMPT[16]),
        (16, PROMPT[32]),
        (32, -1),
    ]
    replica.drain()
    assert replica.scheduler.stats().prefix_cache_queries == len(PROMPT)


def test_what_was_delivered_before_a_preemption_is_not_repeated() -> None:
    """A plan of others fails between the chunks of a prompt, which is then computed again."""
    replica = Replica(Sizes(max_model_len=128, max_num_batched_tokens=16, num_stages=2))
    key = replica.add(PROMPT, prompt_logprobs=0, frequency_penalty=1.0)
    replica.schedule()
    replica.apply()
    replica.add((9, 9, 9, 9, 9))
    assert len(replica.clients[key].prompt_logprobs) == 16
    other = replica.schedule(fails=True)
    assert [len(step.token_ids) for step in other.steps] == [5]
    replica.apply()
    assert replica.scheduler.stats().num_preemptions == 1
    replica.drain()
    assert len(replica.clients[key].prompt_logprobs) == len(PROMPT) - 1


def test_delivered_prompt_logprobs_are_not_asked_for_again() -> None:
    sizes = Sizes(num_blocks=13, max_model_len=48, max_num_batched_tokens=32, num_slots=2)
    replica = Replica(sizes)
    replica.add(PROMPT[:6], max_tokens=30)
    replica.add(PROMPT[:22], max_tokens=20, prompt_logprobs=0)
    asked = []
    while replica.live:
        plan = replica.schedule()
        asked += [new.params.prompt_logprobs for new in plan.new_slots]
        replica.apply()
    assert asked[:2] == [None, 0]
    assert replica.scheduler.stats().num_preemptions > 0
    assert set(asked[2:]) == {None}
