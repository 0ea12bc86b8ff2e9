"""Phases of an engine inside a trainer: who waits for whom, and what ends the waiting."""

import asyncio
import re

import pytest
from support.replicas import info, watch_of

from aioengine.control.watch import Watch
from aioengine.engine import phases
from aioengine.engine.phases import LeaderPhases, PeerPhases
from aioengine.errors import EngineError, PhaseTimeoutError, ReplicaFailedError
from aioengine.messages import EngineLeft, PeerCommand, PhaseBegan, PhaseEnded, PhaseEntered


class Pair:
    """A leader, rank 0, and a peer, rank 1; messages arrive at once."""

    def __init__(self) -> None:
        self.leader_watch, self.peer_watch = watch_of(0, [info(1)]), watch_of(1, [info(0)])
        self.leader = LeaderPhases(self.leader_watch, self._to_peer)
        self.peer = PeerPhases(self.peer_watch, info(0), self._to_leader)

    def _to_peer(self, command: PeerCommand) -> None:
        match command:
            case PhaseBegan():
                self.peer.on_began(command)
            case PhaseEnded():
                self.peer.on_ending()
                self.peer.on_ended()

    def _to_leader(self, news: PhaseEntered | EngineLeft) -> None:
        match news:
            case PhaseEntered():
                self.leader.on_entered(1, news)
            case EngineLeft():
                self.leader.on_left(1)

    async def enter(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.peer.enter(None))
            tasks.create_task(self.leader.enter(None))


def is_watching(watch: Watch) -> bool:
    return watch._beats._is_on.is_set()


@pytest.fixture
async def pair() -> Pair:
    pair = Pair()
    for watch in (pair.leader_watch, pair.peer_watch):
        watch.pause()
    return pair


@pytest.mark.parametrize("leader_first", [True, False])
async def test_a_phase_begins_when_all_have_entered(pair: Pair, leader_first: bool) -> None:
    for _ in range(3):
        entries = [pair.leader.enter, pair.peer.enter]
        first, second = entries if leader_first else reversed(entries)
        async with asyncio.TaskGroup() as tasks:
            entering = tasks.create_task(first(None))
            await asyncio.sleep(0)
            assert not entering.done()
            assert not is_watching(pair.leader_watch)
            tasks.create_task(second(None))
        assert pair.leader.is_open
        assert pair.peer._stay.is_active
        assert is_watching(pair.leader_watch)
        assert is_watching(pair.peer_watch)
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(pair.peer.wait_left())
            await asyncio.sleep(0)
            assert not staying.done()
            pair.leader.leave()
        assert not is_watching(pair.leader_watch)
        assert not is_watching(pair.peer_watch)
        await pair.peer.wait_left()  # nothing to wait for


async def test_who_is_missing_is_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(phases, "REMIND_S", 0.01)
    with pytest.raises(PhaseTimeoutError) as caught:
        await pair.leader.enter(0.05)
    assert str(caught.value) == f"active(): {info(1)} did not enter within its timeout of 0.05 s"
    assert f"active(): {info(1)} did not enter yet" in caplog.messages
    with pytest.raises(PhaseTimeoutError, match=re.escape(str(info(0)))):
        await pair.peer.enter(0.05)
    async with asyncio.TaskGroup() as tasks:  # both come later
        tasks.create_task(pair.peer.enter(None))
        tasks.create_task(pair.leader.enter(None))
    assert pair.peer._stay.is_active


async def test_a_leader_whose_entering_is_cancelled_has_not_entered(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pair.leader.enter(None)
    with pytest.raises(PhaseTimeoutError):
        await pair.peer.enter(0.01)
    assert not pair.leader.is_open
    await pair.leader.enter(None)
    assert pair.peer._stay.is_active


async def test_a_peer_whose_entering_is_cancelled_has_entered(pair: Pair) -> None:
    """The phase may have begun elsewhere; entering again goes on where it was."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pair.peer.enter(None)
    await pair.leader.enter(None)
    await pair.peer.enter(None)
    pair.leader.leave()
    await pair.peer.wait_left()


@pytest.mark.parametrize("who", ["leader", "peer"])
async def test_who_did_not_wait_for_the_end_waits_when_entering(pair: Pair, who: str) -> None:
    await pair.enter()
    phases = pair.leader if who == "leader" else pair.peer
    phases.begin_leaving()
    assert not pair.leader.is_open if who == "leader" else pair.peer._stay.is_active
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await phases.wait_left()
    async with asyncio.TaskGroup() as tasks:
        entering = tasks.create_task(phases.enter(None))
        await asyncio.sleep(0.01)
        assert not entering.done()
        pair.leader.leave()
        other = pair.peer if who == "leader" else pair.leader
        tasks.create_task(other.enter(None))
    assert pair.leader.is_open


async def test_leaving_twice_is_leaving_once(pair: Pair) -> None:
    assert not pair.leader.begin_leaving()
    await pair.enter()
    assert pair.leader.begin_leaving()
    assert not pair.leader.begin_leaving()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_rank_that_has_left_the_engine_is_not_waited_for(pair: Pair, when: str) -> None:
    if when == "before":
        pair.peer.leave_engine()
    else:
        asyncio.get_running_loop().call_soon(pair.peer.leave_engine)
    with pytest.raises(EngineError, match=re.escape(f"active(): {info(1)} left the engine")):
        await pair.leader.enter(None)


async def test_failures_end_all_waiting(pair: Pair) -> None:
    asyncio.get_running_loop().call_soon(pair.leader_watch.fail, "rank 1: gone", 1)
    for _ in ("in flight", "later"):
        with pytest.raises(ReplicaFailedError, match="rank 1: gone"):
            await pair.leader.enter(None)


async def test_an_orderly_end_ends_all_waiting(pair: Pair) -> None:
    asyncio.get_running_loop().call_soon(pair.peer.end, EngineError("the leader has left"))
    for _ in ("in flight", "later"):
        with pytest.raises(EngineError, match="the leader has left"):
            await pair.peer.enter(None)
