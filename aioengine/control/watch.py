"""The first failure of a replica, as one rank sees it, and the heartbeats that find it.

Attribution: a rank that dies closes its connections within milliseconds, and makes the collectives
of others fail at about the same time. So a closed connection counts at once, while an exception in
a step waits `BLAME_GRACE_S` for a closed connection that explains it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from aioengine.activity import IDLE
from aioengine.control.loss import explain_loss
from aioengine.control.stall import Sign, find_stall
from aioengine.errors import (
    EngineError,
    RankLostError,
    ReplicaFailedError,
    StepTimeoutError,
    WorkerError,
)
from aioengine.messages import Heartbeat, JobFailed, RankInfo

log = logging.getLogger(__name__)

BLAME_GRACE_S: Final = 1.0
BEATS_PER_LIMIT: Final = 4
MAX_UNANSWERED_BEATS: Final = BEATS_PER_LIMIT - 1
"""A probe is one beat old by then at the least, and the limit has passed since the last answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`rank` is None when the cause was told by another rank, or no single rank is to blame."""

    error: EngineError
    """What calls get that are in flight; later ones get ReplicaFailedError with its text."""
    rank: int | None = None

    @property
    def cause(self) -> str:
        return str(self.error)


def kill_if_here(info: RankInfo, host: str) -> None:
    """SIGKILL for a frozen rank, if it is one of this host."""
    if info.host == host:
        with contextlib.suppress(OSError):
            os.kill(info.pid, signal.SIGKILL)


class Heartbeats:
    """Who has been silent for too long. One owner; keys are its names for the other ends."""

    def __init__(self, limit_s: float) -> None:
        self.interval_s = limit_s / BEATS_PER_LIMIT
        self.excused_at = time.monotonic()
        """When the last interval was discarded: nothing before it counts against anybody."""
        self._limit_s = limit_s
        self._last_heard: dict[Hashable, float] = {}
        self._is_on = asyncio.Event()
        self._is_on.set()

    def heard(self, key: Hashable) -> None:
        """A sign of life; from the first one on (or `run`) the key is watched."""
        self._last_heard[key] = time.monotonic()

    def forget(self, key: Hashable) -> None:
        self._last_heard.pop(key, None)

    def pause(self) -> None:
        """From now on nothing is sent and silence means nothing."""
        self._is_on.clear()

    def resume(self) -> None:
        self._is_on.set()

    async def run(
        self, send_beats: Callable[[], None], on_silent: Callable[[Hashable], None]
    ) -> None:
        """Send and check beats until cancelled. A key that is silent is told of once."""
        interval_s = self.interval_s
        self._excuse()
        while True:
            if not self._is_on.is_set():
                await self._is_on.wait()
                self._excuse()
            before = time.monotonic()
            send_beats()
            await asyncio.sleep(interval_s)
            if not self._is_on.is_set():
                continue
            now = time.monotonic()
            late_s = now - before - interval_s
            if late_s > interval_s:
                log.warning("this loop was %.1f s late; that is not held against others", late_s)
                self._excuse()
                continue
            silent = [key for key, at in self._last_heard.items() if now - at > self._limit_s]
            for key in silent:
                self.forget(key)
                on_silent(key)

    def _excuse(self) -> None:
        self.excused_at = time.monotonic()
        for key in self._last_heard:
            self.heard(key)


class Watch:
    """Watches `others` for this rank. `failed` gets the first failure, once."""

    def __init__(
        self,
        me: RankInfo,
        others: dict[int, RankInfo],
        *,
        heartbeat_seconds: float,
        kill_frozen: bool,
    ) -> None:
        self.me = me
        self.others = others
        self._limit_s = heartbeat_seconds
        self._kill_frozen = kill_frozen
        self._beats = Heartbeats(heartbeat_seconds)
        self.failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._signs: dict[int, tuple[Heartbeat, float]] = {}
        """Of every rank that has beaten, this one too: its last beat and when it came."""
        self._in_call_at = 0.0
        """When a rank was last known to be in a call."""
        self._departed: set[int] = set()
        self._blame_timer: asyncio.TimerHandle | None = None

    # --- what the owner of the links reports

    def heard(self, rank: int, beat: Heartbeat | None = None) -> None:
        if rank not in self._departed:
            self._beats.heard(rank)
        if beat is not None:
            self._note(self.others[rank], beat)

    def noted(self, beat: Heartbeat) -> None:
        """What this rank tells the others about itself."""
        self._note(self.me, beat)

    def departed(self, rank: int) -> None:
        """The rank said goodbye: its connection may close."""
        self._departed.add(rank)
        self._beats.forget(rank)

    def connection_closed(self, rank: int, reason: str) -> None:
        """Told of at once, or a moment later when the kernel knows more. Nothing after a failure:
        a loop that ends meanwhile would keep what the waiting takes."""
        if rank not in self._departed and not self.failed.done():
            info = self.others[rank]
            explain_loss(info, reason, lambda what: self._lose(rank, f"{info}: {what}"))

    def job_failed(self, rank: int, failed: JobFailed, patience: float = 1.0) -> None:
        """A job raised on `rank` (this rank or another). Blamed after `patience` graces."""
        info = self.me if rank == self.me.rank else self.others[rank]
        log.error("%s: job %d raised\n%s", info, failed.seq, failed.traceback)
        if self._blame_timer is None:
            where = f"{info}: job {failed.seq}"
            error = WorkerError(where, failed.type_name, failed.message, failed.traceback)
            delay = patience * BLAME_GRACE_S if self.others else 0.0
            loop = asyncio.get_running_loop()
            self._blame_timer = loop.call_later(delay, self._fail_with, error, rank)

    def fail(self, cause: str, rank: int | None = None) -> None:
        """For what is no loss of a rank, no job that raised, and no late step."""
        self._fail_with(ReplicaFailedError(cause), rank)

    def _lose(self, rank: int, cause: str) -> None:
        self._fail_with(RankLostError(cause), rank)

    def _fail_with(self, error: EngineError, rank: int | None) -> None:
        if not self.failed.done():
            self.failed.set_result(Failure(error, rank))

    # --- steps

    def step_age_s(self, sent_at: float) -> float:
        """Seconds that count for a plan: neither those before this loop was last late, nor those
        in which a rank was in a call, which has a limit of its own."""
        return time.monotonic() - max(sent_at, self._beats.excused_at, self._in_call_at)

    def step_that_lasts(self, limit_s: float) -> int | None:
        """A plan in which a rank has been for longer, whether others have completed it or not."""
        late = [b.step for b, _ in self._signs.values() if b.step and b.doing_s > limit_s]
        return min(late, default=None)

    def fail_step(self, step: int, limit_s: float) -> None:
        """A step has not ended within `--step-timeout-seconds`."""
        stall = find_stall(step, self.signs(), 2 * self._beats.interval_s)
        cause = f"step {step} did not end within --step-timeout-seconds {limit_s:g}: {stall.text}"
        if stall.suspects:
            cause = f"{', '.join(map(str, stall.suspects))}: {cause}"
        rank = stall.suspects[0].rank if len(stall.suspects) == 1 else None
        self._fail_with(StepTimeoutError(cause), rank)
        for info in stall.silent:
            if info is not self.me:
                self.kill(info.rank)

    def signs(self) -> dict[RankInfo, Sign | None]:
        """The last beat of every rank that is watched, and of this one; by rank."""
        now = time.monotonic()
        infos = sorted((self.me, *self.others.values()), key=lambda info: info.rank)
        return {
            info: Sign(found[0], now - found[1]) if (found := self._signs.get(info.rank)) else None
            for info in infos
        }

    # --- heartbeats

    async def run_heartbeats(self, send_beats: Callable[[], None]) -> None:
        """Send and check beats until cancelled. Started once the replica is ready."""
        for rank in self.others.keys() - self._departed:
            self._beats.heard(rank)
        await self._beats.run(send_beats, self._declare_frozen)

    def pause(self) -> None:
        """Only closed connections count as loss, until `resume`."""
        self._beats.pause()

    def resume(self) -> None:
        self._beats.resume()

    def kill(self, rank: int) -> None:
        """End a rank of this host that does not answer, unless `--no-kill-frozen`."""
        if self._kill_frozen:
            kill_if_here(self.others[rank], self.me.host)

    def _declare_frozen(self, rank: Hashable) -> None:
        assert isinstance(rank, int)
        info = self.others[rank]
        sign = self.signs()[info]
        seen = sign.beat.last_words if sign is not None else ""
        limit = f"--heartbeat-seconds {self._limit_s:g}"
        self._lose(rank, f"{info}: silent for more than {limit}{seen}")
        self.kill(rank)

    def _note(self, info: RankInfo, beat: Heartbeat) -> None:
        now = time.monotonic()
        self._signs[info.rank] = (beat, now)
        if beat.doing != IDLE and not beat.step:
            self._in_call_at = now
        if beat.num_unanswered >= MAX_UNANSWERED_BEATS:
            limit = f"--heartbeat-seconds {self._limit_s:g}"
            self._lose(
                info.rank,
                f"{info}: its device thread has nothing to do and has not answered for {limit}; "
                f"it is in {beat.where}, job {beat.last_seq} done; its log has the stacks",
            )
