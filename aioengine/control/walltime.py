"""The end of the job that a launch is part of, and the time that this leaves for answers."""

import time
from collections.abc import Callable
from typing import Final

RESERVE_S: Final = 5.0
"""The last seconds of a job: answers are cut off by then, so that every rank ends in order."""


class Walltime:
    """Arithmetic on `end`, unix seconds, with `clock` as the present.

    None from a property: nobody knows. There may be no end, or it has passed and the job goes on,
    so somebody has moved it.
    """

    def __init__(
        self, end: float | None, margin_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._end = end
        self._margin_s = margin_s
        self._clock = clock

    @property
    def until_end_s(self) -> float | None:
        if self._end is None or self._clock() >= self._end:
            return None
        return self._end - self._clock()

    @property
    def left_s(self) -> float | None:
        """Seconds in which answers must end."""
        until_end_s = self.until_end_s
        return None if until_end_s is None else max(0.0, until_end_s - RESERVE_S)

    @property
    def until_drain_s(self) -> float | None:
        """Seconds until a drain must begin by itself; None also when the margin is 0."""
        until_end_s = self.until_end_s
        if until_end_s is None or not self._margin_s:
            return None
        return max(0.0, until_end_s - self._margin_s)

    @property
    def cause(self) -> str:
        """Why a drain began, in words."""
        if self._end is None:
            return "walltime: the job is about to end"
        return f"walltime: the job ends at {time.strftime('%H:%M:%S', time.localtime(self._end))}"


NO_END: Final = Walltime(None, 0.0)
