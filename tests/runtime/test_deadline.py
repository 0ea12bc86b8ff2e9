"""One limit for the whole start-up, and who is blamed when it is over."""

import asyncio

import pytest
from support.fake_leaders import front_end_with_leaders
from support.mailbox import settle
from support.replicas import info

from aioengine.control.deadline import Deadline, process_age_s
from aioengine.frontend import front_end as front_end_module
from aioengine.messages import RankInfo


def test_a_deadline_counts_what_was_used_before() -> None:
    deadline = Deadline(100.0, used_s=40.0)
    assert 59.0 < deadline.left_s <= 60.0
    assert deadline.limit_s == 100.0


def test_a_deadline_that_is_over_leaves_nothing() -> None:
    assert Deadline(1.0, used_s=2.0).left_s == 0.0


def test_a_deadline_can_follow_another_process() -> None:
    deadline = Deadline(100.0)
    deadline.adopt(7.0)
    assert 6.0 < deadline.left_s <= 7.0


def test_this_process_has_an_age() -> None:
    first = process_age_s()
    assert 0.0 < first <= process_age_s()


async def test_waits_end_with_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(10.0, used_s=10.0).bound():
            await asyncio.Event().wait()


async def test_a_leader_that_freezes_before_it_is_ready_does_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_end_module, "VERDICT_GRACE_S", 0.0)
    frozen: list[RankInfo] = []
    front_end, leaders = front_end_with_leaders(2, frozen=frozen)
    leaders[0].ready()
    await settle()
    assert front_end.health == "starting"
    await front_end.limit_start(Deadline(30.0, used_s=30.0))
    assert front_end.health == "degraded"
    (cause,) = front_end.causes
    assert cause == f"{info(1)}: not ready within --startup-timeout-seconds 30, and silent"
    assert frozen == [info(1)]
