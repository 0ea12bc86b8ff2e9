"""What the scheduler tells front ends for their routing."""

from tests.unit.core.replica_model import Replica, Sizes


def tokens(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i) % 11 for i in range(num_tokens))


def test_an_emptied_prefix_cache_is_another_epoch() -> None:
    scheduler = Replica(Sizes()).scheduler
    epochs = [scheduler.stats().prefix_cache_epoch]
    scheduler.reset_prefix_cache()
    epochs.append(scheduler.stats().prefix_cache_epoch)
    scheduler.weight_version += 1
    epochs.append(scheduler.stats().prefix_cache_epoch)
    assert epochs == sorted(set(epochs))


def test_prefills_are_told_as_they_shrink() -> None:
    replica = Replica(Sizes(max_num_batched_tokens=8, async_scheduling=True))
    left = replica.scheduler.stats
    replica.add(tokens(12))
    replica.add(tokens(9, first=5))
    assert left().num_prefill_tokens == 21
    replica.schedule()
    assert left().num_prefill_tokens == 13
    replica.apply()
    replica.schedule()
    assert left().num_prefill_tokens == 5
    replica.drain()
    replica.add(tokens(12))
    assert left().num_prefill_tokens == 12
    replica.schedule()  # 8 of them are cached
    assert left().num_prefill_tokens == 0
    replica.drain()
    aborted = replica.add(tokens(20, first=3))
    replica.schedule()
    replica.abort(aborted)
    assert left().num_prefill_tokens == 0


def test_a_preempted_request_has_all_its_tokens_to_compute() -> None:
    replica = Replica(Sizes(num_blocks=5, max_model_len=16))
    replica.add(tokens(7), max_tokens=9)
    replica.add(tokens(7, first=3), max_tokens=9)
    while not replica.scheduler.stats().num_preemptions:
        replica.schedule()
        replica.apply()
    assert replica.scheduler.stats().num_prefill_tokens == 9  # two of which it had drawn
    replica.drain()
    assert replica.scheduler.stats().num_prefill_tokens == 0
