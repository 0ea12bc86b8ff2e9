"""An event loop, watched from another thread: how late it is, and what it is blocked in."""

import asyncio
import logging
import threading
import time
from collections import deque
from typing import Final

from aioengine.control.stacks import format_stacks, stacks_of_threads
from aioengine.trace_messages import LoopBlock

log = logging.getLogger(__name__)

TICK_S: Final = 0.5
BLOCKED_S: Final = 1.0
"""A loop that has not run for so long is logged with all stacks, once per block."""
TICKS_KEPT: Final = 120
"""For the greatest lag of the last minute."""


class LoopWatch:
    """Sends the loop a callback every TICK_S and takes the time until it runs.

    Lives in the trace thread; only `_answer` runs on the loop that is watched.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags: deque[float] = deque(maxlen=TICKS_KEPT)
        self._asked_at: float | None = None
        self._answered_at: float | None = None
        self._block: LoopBlock | None = None
        self._block_began_at = 0.0

    async def run(self) -> None:
        """Until the loop is closed."""
        while not self._loop.is_closed():
            self._ask()
            slept_from = time.monotonic()
            await asyncio.sleep(TICK_S)
            if time.monotonic() - slept_from > 2 * TICK_S:
                self._asked_at = None  # this thread was late, too: stopped, or all cores are taken
                continue
            self._look()

    @property
    def lag_s(self) -> float:
        """How late the loop is at the moment, or was the last time it was asked."""
        asked_at, answered_at = self._asked_at, self._answered_at
        if asked_at is not None and answered_at is None:
            return time.monotonic() - asked_at
        return self._lags[-1] if self._lags else 0.0

    @property
    def max_lag_s(self) -> float:
        """Within the last minute."""
        return max((*self._lags, self.lag_s))

    def block(self) -> LoopBlock | None:
        """The last time the loop was blocked; it may be now."""
        block = self._block
        if block is None:
            return None
        age_s = time.monotonic() - self._block_began_at
        lasted_s = block.lasted_s if block.is_over else age_s
        return LoopBlock(age_s - lasted_s, lasted_s, block.is_over, block.stacks)

    def _ask(self) -> None:
        if self._asked_at is not None:
            return  # it has not answered the last one
        self._answered_at = None
        self._asked_at = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # closed in this moment
            self._asked_at = None

    def _answer(self) -> None:
        self._answered_at = time.monotonic()

    def _look(self) -> None:
        asked_at, answered_at = self._asked_at, self._answered_at
        if asked_at is None:
            return
        is_noted = self._block is not None and not self._block.is_over
        if answered_at is not None:
            self._lags.append(answered_at - asked_at)
            self._asked_at = None
            if is_noted:
                self._note(asked_at, answered_at - asked_at, is_over=True)
        elif not is_noted and time.monotonic() - asked_at > BLOCKED_S:
            self._note(asked_at, 0.0, is_over=False)
            assert self._block is not None
            # Not from this thread: the loop may be blocked in a log line of its own, and this one
            # would wait for the same lock.
            threading.Thread(
                target=log.warning,
                args=(
                    "the event loop has not run for %.1f s\n%s",
                    time.monotonic() - asked_at,
                    format_stacks(self._block.stacks),
                ),
                name="log of a blocked loop",
                daemon=True,
            ).start()

    def _note(self, began_at: float, lasted_s: float, *, is_over: bool) -> None:
        old = self._block
        stacks = old.stacks if is_over and old is not None else stacks_of_threads()
        self._block_began_at = began_at
        self._block = LoopBlock(0.0, lasted_s, is_over, stacks)
