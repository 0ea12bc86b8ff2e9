"""What is ahead of a request: the leader's word, and what was sent since."""

from aioengine.frontend.backlog import Backlog
from aioengine.messages import LoadStats, ReplicaReady


def backlog(num_slots: int = 4, num_blocks: int = 10) -> Backlog:
    return Backlog(
        ReplicaReady(
            ranks=(), num_blocks=num_blocks, block_size=16, max_model_len=160, num_slots=num_slots
        )
    )


def test_what_was_sent_counts_until_the_leader_counts_it() -> None:
    ahead = backlog()
    ahead.sent("a", 10)
    ahead.sent("b", 20)
    ahead.sent("c", 30)
    assert (ahead.num_requests, ahead.num_prefill_tokens) == (3, 60)
    others = LoadStats(num_running=3, num_waiting=1, num_prefill_tokens=100)  # "a" among them
    ahead.reported(others, num_added=1)
    assert (ahead.num_requests, ahead.num_prefill_tokens) == (6, 150)
    ahead.reported(others, num_added=3)
    assert (ahead.num_requests, ahead.num_prefill_tokens) == (4, 100)


def test_what_ended_unseen_counts_no_more() -> None:
    """Its number is still one that the leader counts."""
    ahead = backlog()
    for request_id in "abc":
        ahead.sent(request_id, 10)
    ahead.ended("a")
    ahead.ended("a")
    assert (ahead.num_requests, ahead.num_prefill_tokens) == (2, 20)
    ahead.reported(LoadStats(num_running=1), num_added=2)
    assert (ahead.num_requests, ahead.num_prefill_tokens) == (2, 10)
    ahead.ended("b")
    assert ahead.num_requests == 2


def test_a_request_would_run_at_once_in_a_free_slot() -> None:
    ahead = backlog(num_slots=3)
    assert ahead.has_room(1)
    ahead.reported(LoadStats(num_running=1, num_waiting=1, num_free_blocks=10), 0)
    assert ahead.has_room(1)  # the other one has just come: both will be in the next step
    ahead.sent("a", 1)
    assert not ahead.has_room(1)


def test_a_request_would_run_at_once_in_free_blocks() -> None:
    """It takes as many as hold its prompt and one more token."""
    ahead = backlog(num_blocks=10)
    assert ahead.has_room(159)
    assert not ahead.has_room(160)
    ahead.reported(LoadStats(num_running=1, num_free_blocks=4), 0)
    assert ahead.has_room(63)
    assert not ahead.has_room(64)
    ahead.sent("a", 15)
    assert ahead.has_room(32)
    assert not ahead.has_room(33)
    waiting = LoadStats(num_waiting=1, num_prefill_tokens=40, num_free_blocks=4)
    ahead.reported(waiting, num_added=1)
    assert ahead.has_room(7)
    assert not ahead.has_room(8)
