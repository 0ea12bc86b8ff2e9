"""One clock for the ranks of a launch. Times are CLOCK_MONOTONIC in nanoseconds."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What to add to a rank's times to have them on the clock of whoever asked."""

    offset_ns: int
    error_ns: int
    """The true offset is not further away than this, whatever the network's two ways take."""


SAME_CLOCK = ClockOffset(0, 0)


def own_clock() -> str:
    """Names the clock that this process reads: processes of one kernel and time namespace share
    theirs."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # Linux before 5.6 has none
        namespace = ""
    return f"{boot} {namespace}"


def estimate(trips: Iterable[tuple[int, int, int]]) -> ClockOffset:
    """From round trips: asked and answered by the asker's clock, and the reading between the two.

    The reading was taken at some moment of the trip, so the shortest trip knows best.
    """
    asked_ns, reading_ns, answered_ns = min(trips, key=lambda trip: trip[2] - trip[0])
    half_ns = (answered_ns - asked_ns) // 2
    return ClockOffset(asked_ns + half_ns - reading_ns, half_ns + 1)
