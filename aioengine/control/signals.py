"""SIGTERM, SIGINT and SIGUSR1 as events, and the launcher's death as another."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable

log = logging.getLogger(__name__)

ORPHAN_DRAIN_S = 5.0
"""What the requests in flight get when the launcher is gone."""
ORPHAN_MARGIN_S = 5.0
"""For ending in order after that; then the process just ends."""


class Signals:
    """The first signal asks for a drain, the second ends the streams.

    SIGUSR1, which a cluster sends before a job's walltime is over, is never a second one; the
    SIGTERM that follows at the end is. `launcher_pid` is watched: when that process is gone, a
    drain begins, and no drain lasts much longer. It is 0 where there is no launcher, or none that
    this process can see.
    """

    def __init__(self, drain_limit_s: float, launcher_pid: int) -> None:
        self.first = asyncio.Event()
        """A signal, or whatever else asks for a drain."""
        self.is_for_walltime = False
        """What asked first did so because the job is about to end."""
        self.drain_limit_s = drain_limit_s
        self.drain_over = asyncio.Event()
        """Before its limit: by a second signal, or because the launcher is gone."""
        self.on_first: Callable[[], None] | None = None
        self.on_stuck_orphan: Callable[[], None] | None = None
        """The launcher is gone and the drain did not end in its time."""
        self._loop = asyncio.get_running_loop()
        self._num_received = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_signal_handler(signal.SIGUSR1, self._on_walltime_signal)
        if launcher_pid:
            self._watch(launcher_pid)

    def request_drain(self, *, for_walltime: bool = False) -> None:
        """As if the first signal had come; of several requests the first one counts."""
        if self.first.is_set():
            return
        if for_walltime:
            self.is_for_walltime = True
            self._num_received = 1
        self.first.set()
        if self.on_first is not None:
            self.on_first()

    def _on_signal(self, number: signal.Signals) -> None:
        log.info("%s", signal.Signals(number).name)
        self._num_received += 1
        if self._num_received > 1:  # a drain that another rank asked for does not count
            self.drain_over.set()
        self.request_drain()

    def _on_walltime_signal(self) -> None:
        log.info("SIGUSR1")
        self.request_drain(for_walltime=True)

    def _watch(self, launcher_pid: int) -> None:
        try:
            launcher_fd = os.pidfd_open(launcher_pid)
        except ProcessLookupError:
            launcher_fd = None
        if launcher_fd is None or os.getppid() != launcher_pid:  # it may be another's number now
            self._loop.call_soon(self._on_launcher_gone, launcher_pid)
            return

        def on_readable() -> None:
            self._loop.remove_reader(launcher_fd)
            os.close(launcher_fd)
            self._on_launcher_gone(launcher_pid)

        self._loop.add_reader(launcher_fd, on_readable)

    def _on_launcher_gone(self, launcher_pid: int) -> None:
        log.error("the launcher (pid %d) is gone; this rank ends within seconds", launcher_pid)
        self.drain_limit_s = min(self.drain_limit_s, ORPHAN_DRAIN_S)
        self._loop.call_later(ORPHAN_DRAIN_S, self.drain_over.set)  # of one that has begun, too
        if self.on_stuck_orphan is not None:
            self._loop.call_later(ORPHAN_DRAIN_S + ORPHAN_MARGIN_S, self.on_stuck_orphan)
        self.request_drain()
