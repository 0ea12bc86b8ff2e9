"""Phases of an engine that lives in a trainer's ranks: when it may compute, and when not.

A phase begins once every rank of the replica has entered it, and ends when the leader leaves; the
peers stay until then. In between heartbeats are watched; outside, a trainer may block its threads
and use its own collectives: the device thread runs none, and only closed connections count as loss.
Loop thread only.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

from aioengine.control.watch import Failure, Watch
from aioengine.errors import EngineError, PhaseTimeoutError, ReplicaFailedError
from aioengine.messages import (
    EngineLeft,
    PeerCommand,
    PhaseBegan,
    PhaseEnded,
    PhaseEntered,
    RankInfo,
)

log = logging.getLogger(__name__)

REMIND_S: Final = 30.0
"""How often a rank that waits for others says so in its log."""


class Waits:
    """What somebody awaits of a replica: futures that end with it."""

    def __init__(self, watch: Watch) -> None:
        self._error: EngineError | None = None
        self._pending: set[asyncio.Future[None]] = set()
        watch.failed.add_done_callback(self._on_failed)

    def new(self) -> "asyncio.Future[None]":
        """Raises, and its future gets, what `end` was told."""
        self.check()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def end(self, error: EngineError) -> None:
        """Nothing more will come; the first call counts."""
        if self._error is None:
            self._error = error
            for future in list(self._pending):
                if not future.done():
                    future.set_exception(error)

    def _on_failed(self, failed: "asyncio.Future[Failure]") -> None:
        self.end(ReplicaFailedError(failed.result().cause))


class Stay:
    """This rank's part of a phase, until that has ended on every rank. A program may stop waiting
    for the end; who enters again, or leaves the engine, waits for it first."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._over: asyncio.Future[None] | None = None
        self.is_active = False
        self.is_leaving = False
        """The program has left."""

    def begin(self) -> None:
        self.is_active = True

    def end(self) -> None:
        self.is_active = self.is_leaving = False
        _done(self._over)

    async def wait_over(self) -> None:
        """Returns when this rank is in no phase. One caller at a time; raises what `Waits` was
        told."""
        self._waits.check()
        if self.is_active:
            self._over = self._waits.new()
            await self._over


async def wait_entered(
    began: "asyncio.Future[None]", describe_missing: Callable[[], str], timeout_s: float | None
) -> None:
    """Wait for the others, and say now and then for whom. Raises PhaseTimeoutError."""
    loop = asyncio.get_running_loop()
    end = None if timeout_s is None else loop.time() + timeout_s
    while not began.done():
        left = REMIND_S if end is None else min(REMIND_S, end - loop.time())
        if left <= 0:
            raise PhaseTimeoutError(
                f"active(): {describe_missing()} within its timeout of {timeout_s:g} s"
            )
        await asyncio.wait([began], timeout=left)
        if not began.done() and left == REMIND_S:
            log.warning("active(): %s yet", describe_missing())
    await began


class LeaderPhases:
    """The leader's side: it decides when a phase begins and ends."""

    def __init__(self, watch: Watch, broadcast: Callable[[PeerCommand], None]) -> None:
        self._watch = watch
        self._broadcast = broadcast
        self._waits = Waits(watch)
        self._stay = Stay(self._waits)
        self._ranks: Collection[RankInfo] = (watch.me, *watch.others.values())
        self._phase = 0
        self._entered: set[int] = set()
        """Ranks that are ready for the next phase."""
        self._gone: set[int] = set()
        """Ranks whose program has left the engine."""
        self._began: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the program is in a phase."""
        return self._stay.is_active and not self._stay.is_leaving and self._began is None

    async def enter(self, timeout_s: float | None) -> None:
        """Returns when every rank has entered. Raises PhaseTimeoutError that names who has not,
        EngineError that names who has left the engine, ReplicaFailedError."""
        await self._stay.wait_over()
        self._began = self._waits.new()
        try:
            self.on_entered(self._watch.me.rank, PhaseEntered(self._phase + 1))
            self._refuse_without_gone()
            await wait_entered(self._began, self._describe_missing, timeout_s)
        except BaseException:
            self._entered.discard(self._watch.me.rank)
            if self._stay.is_active:
                self.leave()
            raise
        finally:
            self._began.cancel()
            self._began = None

    def begin_leaving(self) -> bool:
        """The program leaves. False when there is nothing to leave, or it has left before."""
        if not self.is_open:
            return False
        self._stay.is_leaving = True
        return True

    def leave(self) -> None:
        """End the phase: to be called when no job is left on any rank."""
        self._watch.pause()
        self._broadcast(PhaseEnded(self._phase))
        self._stay.end()

    async def wait_left(self) -> None:
        """Returns when the phase has ended."""
        await self._stay.wait_over()

    def on_entered(self, rank: int, entered: PhaseEntered) -> None:
        assert entered.phase == self._phase + 1, (
            f"rank {rank} enters phase {entered.phase}, {self._phase + 1} is next"
        )
        self._entered.add(rank)
        if self._began is None or len(self._entered) < len(self._ranks):
            return
        self._entered.clear()
        self._phase += 1
        self._stay.begin()
        self._watch.resume()
        self._broadcast(PhaseBegan(self._phase))
        _done(self._began)

    def on_left(self, rank: int) -> None:
        """The program of `rank` has left the engine: there will be no more phase."""
        self._gone.add(rank)
        self._refuse_without_gone()

    def _refuse_without_gone(self) -> None:
        if self._gone and self._began is not None and not self._began.done():
            gone = (str(info) for info in self._ranks if info.rank in self._gone)
            self._began.set_exception(EngineError(f"active(): {', '.join(gone)} left the engine"))

    def _describe_missing(self) -> str:
        missing = (str(info) for info in self._ranks if info.rank not in self._entered)
        return f"{', '.join(missing)} did not enter"


class PeerPhases:
    """A peer's side: it says when it is ready, and stays until the leader leaves."""

    def __init__(
        self,
        watch: Watch,
        leader: RankInfo,
        send: Callable[[PhaseEntered | EngineLeft], None],
    ) -> None:
        self._watch = watch
        self._leader = leader
        self._send = send
        self._waits = Waits(watch)
        self._stay = Stay(self._waits)
        self._phase = 0
        self._has_entered = False
        self._began: asyncio.Future[None] | None = None

    async def enter(self, timeout_s: float | None) -> None:
        """Returns when the phase has begun. A rank whose entering was cut short has entered
        nevertheless; entering again goes on where it was. Raises PhaseTimeoutError."""
        if self._stay.is_leaving:
            await self._stay.wait_over()
        self._waits.check()
        if self._stay.is_active:
            return
        self._began = self._waits.new()
        if not self._has_entered:
            self._has_entered = True
            self._send(PhaseEntered(self._phase + 1))
        try:
            await wait_entered(self._began, self._describe_missing, timeout_s)
        finally:
            self._began.cancel()
            self._began = None

    def begin_leaving(self) -> None:
        """The program leaves; the rank stays until the leader has left."""
        self._stay.is_leaving = self._stay.is_active

    async def wait_left(self) -> None:
        """Returns when the leader has left the phase."""
        await self._stay.wait_over()

    def leave_engine(self) -> None:
        """The program enters no more phase."""
        self._send(EngineLeft())

    def end(self, error: EngineError) -> None:
        self._waits.end(error)

    def on_began(self, began: PhaseBegan) -> None:
        self._phase = began.phase
        self._has_entered = False
        self._stay.begin()
        self._watch.resume()
        _done(self._began)

    def on_ending(self) -> None:
        """The leader has left, and sends no more heartbeats."""
        self._watch.pause()

    def on_ended(self) -> None:
        """This rank's device thread has done the phase's last job."""
        self._stay.end()

    def _describe_missing(self) -> str:
        return f"the phase did not begin: {self._leader}, or another rank of it, did not enter"


def _done(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)
