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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aioengine.messages import Heartbeat, JobFailed, RankInfo

log = logging.getLogger(__name__)

BLAME_GRACE_S: Final = 1.0
BEATS_PER_LIMIT: Final = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """`rank` is None when the cause was told by another rank."""

    cause: str
    rank: int | None = None


class Watch:
    """Watches `others` for this rank. `failed` gets the first failure, once."""

    def __init__(self, me: RankInfo, others: dict[int, RankInfo]) -> None:
        self.me = me
        self.others = others
        self.failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._last_heard = dict.fromkeys(others, time.monotonic())
        self._last_beat: dict[int, Heartbeat] = {}
        self._departed: set[int] = set()
        self._blame_timer: asyncio.TimerHandle | None = None

    # --- what the owner of the links reports

    def heard(self, rank: int, beat: Heartbeat | None = None) -> None:
        self._last_heard[rank] = time.monotonic()
        if beat is not None:
            self._last_beat[rank] = beat

    def departed(self, rank: int) -> None:
        """The rank said goodbye: its connection may close."""
        self._departed.add(rank)

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

    async def run_heartbeats(
        self, limit_s: float, kill_frozen: bool, send_beat: Callable[[], None]
    ) -> None:
        """Send and check beats until cancelled. Started once the replica is ready."""
        interval_s = limit_s / BEATS_PER_LIMIT
        for rank in self.others:
            self.heard(rank)
        while True:
            before = time.monotonic()
            send_beat()
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            if now - before > 2 * interval_s:
                log.warning(
                    "this loop was %.1f s late; its interval is not held against others",
                    now - before - interval_s,
                )
                for rank in self.others:
                    self.heard(rank)
                continue
            for rank, heard in self._last_heard.items():
                if now - heard > limit_s and rank not in self._departed:
                    self._declare_frozen(rank, limit_s, kill_frozen)

    def _declare_frozen(self, rank: int, limit_s: float, kill: bool) -> None:
        info = self.others[rank]
        beat = self._last_beat.get(rank)
        seen = f"; it was last in {beat.doing}, job {beat.last_seq} done" if beat else ""
        self.fail(f"{info}: silent for more than --heartbeat-seconds {limit_s:g}{seen}", rank)
        if kill and info.host == self.me.host:
            with contextlib.suppress(OSError):
                os.kill(info.pid, signal.SIGKILL)
