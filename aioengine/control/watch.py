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

from aioengine.messages import Heartbeat, JobFailed, RankInfo

log = logging.getLogger(__name__)

BLAME_GRACE_S: Final = 1.0
BEATS_PER_LIMIT: Final = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """`rank` is None when no single rank is to blame."""

    cause: str
    rank: int | None = None


def kill_if_here(info: RankInfo, host: str) -> None:
    """SIGKILL for a frozen rank, if it is one of this host."""
    if info.host == host:
        with contextlib.suppress(OSError):
            os.kill(info.pid, signal.SIGKILL)


class Heartbeats:
    """Who has been silent for too long. One owner; keys are its names for the other ends."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last_heard: dict[Hashable, float] = {}

    def heard(self, key: Hashable) -> None:
        """A sign of life; from the first one on (or `run`) the key is watched."""
        self._last_heard[key] = time.monotonic()

    def forget(self, key: Hashable) -> None:
        self._last_heard.pop(key, None)

    async def run(
        self, send_beats: Callable[[], None], on_silent: Callable[[Hashable], None]
    ) -> None:
        """Send and check beats until cancelled. A key that is silent is told of once."""
        interval_s = self._limit_s / BEATS_PER_LIMIT
        self._excuse()
        while True:
            before = time.monotonic()
            send_beats()
            await asyncio.sleep(interval_s)
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
        self._last_beat: dict[int, Heartbeat] = {}
        self._departed: set[int] = set()
        self._blame_timer: asyncio.TimerHandle | None = None

    # --- what the owner of the links reports

    def heard(self, rank: int, beat: Heartbeat | None = None) -> None:
        if rank not in self._departed:
            self._beats.heard(rank)
        if beat is not None:
            self._last_beat[rank] = beat

    def departed(self, rank: int) -> None:
        """The rank said goodbye: its connection may close."""
        self._departed.add(rank)
        self._beats.forget(rank)

    def connection_closed(self, rank: int, reason: str) -> None:
        if rank not in self._departed:
            self.fail(f"{self.others[rank]}: {reason} (killed, crashed or unreachable)", rank)

    def job_failed(self, rank: int, failed: JobFailed, patience: float = 1.0) -> None:
        """A job raised on `rank` (this rank or another). Blamed after `patience` graces."""
        info = self.me if rank == self.me.rank else self.others[rank]
        log.error("%s: job %d raised\n%s", info, failed.seq, failed.traceback)
        if self._blame_timer is None:
            cause = f"{info}: job {failed.seq}: {failed.type_name}: {failed.message}"
            delay = patience * BLAME_GRACE_S if self.others else 0.0
            loop = asyncio.get_running_loop()
            self._blame_timer = loop.call_later(delay, self.fail, cause, rank)

    def fail(self, cause: str, rank: int | None = None) -> None:
        if not self.failed.done():
            self.failed.set_result(Failure(cause, rank))

    # --- heartbeats

    async def run_heartbeats(self, send_beats: Callable[[], None]) -> None:
        """Send and check beats until cancelled. Started once the replica is ready."""
        for rank in self.others.keys() - self._departed:
            self._beats.heard(rank)
        await self._beats.run(send_beats, self._declare_frozen)

    def kill(self, rank: int) -> None:
        """End a rank of this host that does not answer, unless `--no-kill-frozen`."""
        if self._kill_frozen:
            kill_if_here(self.others[rank], self.me.host)

    def _declare_frozen(self, rank: Hashable) -> None:
        assert isinstance(rank, int)
        beat = self._last_beat.get(rank)
        seen = f"; it was last in {beat.doing}, job {beat.last_seq} done" if beat else ""
        limit = f"--heartbeat-seconds {self._limit_s:g}"
        self.fail(f"{self.others[rank]}: silent for more than {limit}{seen}", rank)
        self.kill(rank)
