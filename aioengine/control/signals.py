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
    SIGTERM that follows at the end is. `drain_limit_s` bounds the drain; it shrinks when the
    launcher has died.
    """

    def __init__(self, drain_limit_s: float, watch_parent: bool) -> None:
        self.first = asyncio.Event()
        """A signal, or whatever else asks for a drain."""
        self.is_for_walltime = False
        """What asked first did so because the job is about to end."""
        self.second = asyncio.Event()
        self.drain_limit_s = drain_limit_s
        self.on_first: Callable[[], None] | None = None
        self.on_stuck_orphan: Callable[[], None] | None = None
        """The launcher is gone and the drain did not end in its time."""
        self._num_received = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, self._on_walltime_signal)
        self._parent_pid = os.getppid()
        if watch_parent and self._parent_pid != 0:  # 0: not in this container, no way to watch it
            self._parent_fd = os.pidfd_open(self._parent_pid)
            loop.add_reader(self._parent_fd, self._on_parent_gone)

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
        if self._num_received > 1:  # a drain that a failure began does not count
            self.second.set()
        self.request_drain()

    def _on_walltime_signal(self) -> None:
        log.info("SIGUSR1")
        self.request_drain(for_walltime=True)

    def _on_parent_gone(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._parent_fd)
        if not self.first.is_set():
            log.error("the launcher (pid %d) is gone; draining", self._parent_pid)
        self.drain_limit_s = min(self.drain_limit_s, ORPHAN_DRAIN_S)
        if self.on_stuck_orphan is not None:
            loop.call_later(ORPHAN_DRAIN_S + ORPHAN_MARGIN_S, self.on_stuck_orphan)
        self.request_drain()
