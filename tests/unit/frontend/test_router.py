"""Which replica wins: cost, ties, room, equal beginnings, choices of one prompt."""

import itertools

import msgspec
import pytest

from aioengine.frontend.router import REQUEST_COST, Candidate, Router, choose
from aioengine.messages import LoadStats, ReplicaReady

READY = ReplicaReady(ranks=(), num_blocks=1000, block_size=16, max_model_len=10_000, num_slots=128)
UNCACHED = msgspec.structs.replace(READY, enable_prefix_caching=False)
IDLE = LoadStats(num_free_blocks=1000)


def prompt(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


class Placed:
    """A router over replicas that are ready, and whose leaders say what a test says."""

    def __init__(self, num_replicas: int = 3, first: int = 0, ready: ReplicaReady = READY) -> None:
        self.router = Router(num_replicas, first)
        self.num_sent = [0] * num_replicas
        self.ids = map(str, itertools.count())
        for index in range(num_replicas):
            self.router.open(index, ready)

    def place(
        self, token_ids: tuple[int, ...], n: int = 1, *, salt: str = "", pin: int | None = None
    ) -> list[int]:
        asked = self.router.prompt(token_ids, salt)
        places = [self.router.place(next(self.ids), asked, pin=pin) for _ in range(n)]
        for index in places:
            self.num_sent[index] += 1
        return places

    def report(self, index: int, stats: LoadStats = IDLE) -> None:
        """The leader has seen all that was sent to it."""
        self.router.reported(index, stats, self.num_sent[index])

    def all_idle(self) -> None:
        for index in range(len(self.num_sent)):
            self.report(index)


def loaded(num_running: int, num_prefill_tokens: int = 0) -> LoadStats:
    return LoadStats(
        num_running=num_running, num_free_blocks=1000, num_prefill_tokens=num_prefill_tokens
    )


# --- choosing ------------------------------------------------------------------------------------


def test_the_least_loaded_wins_and_equals_take_turns() -> None:
    idle, busy = Candidate(0, 0), Candidate(1, 0)
    assert choose([busy, idle, idle], [0, 1, 2]) == 1
    assert choose([busy, idle, idle], [0, 2, 1]) == 2
    assert choose([busy, None, idle], [0, 1, 2]) == 2
    assert choose([None, None], [0, 1]) is None


@pytest.mark.parametrize(("others", "fair"), [(0, 0), (1, 4), (2, 8), (5, 20), (6, 22), (50, 66)])
def test_some_times_what_others_have_is_fair(others: int, fair: int) -> None:
    """But not with little to do, nor many requests more."""
    assert choose([Candidate(fair, 0), Candidate(others, 0)], [0, 1]) == 0
    assert choose([Candidate(fair, 1), Candidate(others, 0)], [0, 1]) == 1


def test_with_little_to_do_the_idle_one_comes_first() -> None:
    one, idle = Candidate(1, 0), Candidate(0, 0)
    assert choose([one, one, one, idle], range(4)) == 3
    assert choose([Candidate(40, 0), idle], range(2)) == 1


def test_who_lacks_a_beginning_that_others_share_gets_it() -> None:
    """Before it idles beside them."""
    busy = Candidate(5, 0, num_cached_tokens=5 * REQUEST_COST - 1)
    assert choose([busy, busy, Candidate(0, 0)], [2, 0, 1]) == 2


def test_prompts_to_compute_count_as_requests_do() -> None:
    assert choose([Candidate(0, 4 * REQUEST_COST), Candidate(1, 0)], [0, 1]) == 0
    assert choose([Candidate(0, 4 * REQUEST_COST + 1), Candidate(1, 0)], [0, 1]) == 1


def test_a_cached_prompt_makes_up_for_load() -> None:
    cached = Candidate(5, 0, num_cached_tokens=3 * REQUEST_COST + 1)
    assert choose([Candidate(2, 0), cached], [0, 1]) == 1
    assert choose([Candidate(1, 0), cached], [0, 1]) == 0
    assert choose([cached, Candidate(5, 0, num_cached_tokens=10)], [1, 0]) == 0
    assert choose([cached, Candidate(4, 0, num_cached_tokens=1000)], [0, 1]) == 1


def test_nobody_waits_while_another_has_room() -> None:
    full = Candidate(0, 0, num_cached_tokens=10_000, has_room=False)
    assert choose([full, Candidate(30, 5000)], [0, 1]) == 1
    assert choose([full, None], [0, 1]) == 0
    assert choose([full, Candidate(30, 5000, has_room=False)], [0, 1]) == 0


# --- what a router knows -------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 2])
def test_front_ends_begin_at_different_places(first: int) -> None:
    placed = Placed(first=first)
    places = [place for i in range(6) for place in placed.place(prompt(5, i))]
    assert places == [(first + i) % 3 for i in range(6)]


def test_who_got_something_by_its_beginning_or_a_pin_has_had_its_turn() -> None:
    placed = Placed()
    placed.place(prompt(300), pin=0)
    for i, place in enumerate([1, 2, 1, 2]):
        placed.all_idle()
        assert placed.place(prompt(300)) == [0]
        placed.all_idle()
        assert placed.place(prompt(5, i)) == [place]


def test_requests_of_other_front_ends_count() -> None:
    placed = Placed(2)
    placed.report(0, loaded(5))
    assert [placed.place(prompt(5, i))[0] for i in range(3)] == [1, 1, 0]


def test_an_equal_beginning_attracts() -> None:
    placed = Placed()
    system = prompt(300)
    (home,) = placed.place(system + prompt(20, 1000))
    placed.all_idle()
    for i in range(5):
        assert placed.place(system + prompt(20, 2000 + i)) == [home]
        placed.report(home, loaded(1))  # a request that costs less than the prompt
    assert placed.place(system + prompt(20, 3000), salt="other") != [home]


def test_what_is_short_or_not_reused_does_not_attract() -> None:
    placed = Placed()
    for _ in range(3):
        placed.place(prompt(63))
        placed.all_idle()
    assert placed.num_sent == [1, 1, 1]
    placed.place(prompt(300))
    placed.all_idle()
    asked = placed.router.prompt(prompt(300), "")
    assert placed.router.place("x", asked, reads_cache=False) == 1


def test_without_prefix_caching_nothing_attracts() -> None:
    placed = Placed(ready=UNCACHED)
    for _ in range(3):
        placed.place(prompt(300))
        placed.all_idle()
    assert placed.num_sent == [1, 1, 1]


def test_a_longer_way_elsewhere_does_not_attract() -> None:
    """Who waits for others' prompts longer than for its own goes to the idle one."""
    placed = Placed(2)
    placed.place(prompt(300))
    placed.report(0, loaded(1, num_prefill_tokens=200))
    assert placed.place(prompt(300)) == [1]


def test_an_emptied_cache_is_forgotten() -> None:
    placed = Placed()
    placed.place(prompt(300))
    placed.place(prompt(300, 1000), pin=1)
    emptied = LoadStats(num_free_blocks=1000, prefix_cache_epoch=1)
    placed.all_idle()
    placed.report(0, emptied)
    assert placed.place(prompt(300)) == [2]  # the next in turn
    placed.all_idle()
    assert placed.place(prompt(300, 1000)) == [1]  # whose cache is as it was


def test_a_replica_that_is_gone_gets_nothing() -> None:
    placed = Placed()
    placed.place(prompt(300))
    placed.router.close(0)
    placed.report(0)  # it crossed the news
    placed.router.ended(0, "anything")
    places = placed.place(prompt(300)) + placed.place(prompt(300, 1000), n=7)
    assert set(places) == {1, 2}


# --- choices of one prompt -----------------------------------------------------------------------


def test_choices_of_a_long_prompt_stay_together_while_that_is_cheaper() -> None:
    placed = Placed(2)
    num_together = 4096 // REQUEST_COST
    places = placed.place(prompt(4096), n=num_together + 1)
    assert places == [0] * num_together + [1]


def test_choices_of_a_short_prompt_spread() -> None:
    placed = Placed(4)
    placed.place(prompt(20), n=8)
    assert placed.num_sent == [2, 2, 2, 2]


def test_a_prompt_that_is_being_computed_is_ahead_of_other_requests() -> None:
    """Only its own choices wait for it anyway."""
    placed = Placed(2)
    assert placed.place(prompt(400), n=2) == [0, 0]
    assert placed.place(prompt(400)) == [1]


def test_a_pin_is_a_pin() -> None:
    placed = Placed()
    assert placed.place(prompt(500), n=20, pin=2) == [2] * 20
    placed.report(2, loaded(1))
    assert placed.place(prompt(500)) == [2]  # where it is known now
