"""One limit for many waits: each gets what is left of it."""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

VERDICT_GRACE_S: Final = 0.5
"""Who waits for another rank's verdict waits this much longer than that rank does."""


class Deadline:
    """The end of a limit that began `used_s` seconds ago. Any thread may ask."""

    def __init__(self, limit_s: float, used_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self._at = time.monotonic() + limit_s - used_s

    @property
    def left_s(self) -> float:
        """Seconds until the end; 0 from then on."""
        return max(0.0, self._at - time.monotonic())

    def adopt(self, left_s: float) -> None:
        """Follow another process's deadline of the same limit, which has this much left."""
        self._at = time.monotonic() + left_s

    def bound(self, grace_s: float = 0.0) -> asyncio.Timeout:
        """An asyncio timeout that ends with this deadline, or `grace_s` after it."""
        return asyncio.timeout(self.left_s + grace_s)


def process_age_s() -> float:
    """Seconds since this process was started, imports included (Linux, proc_pid_stat(5))."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, counted behind the name
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


async def wait_first(*events: asyncio.Event, limit_s: float | None = None) -> None:
    """Return when one of the events is set, or the limit is over."""
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
