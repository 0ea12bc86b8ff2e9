"""How Python runs a process that is ours alone: never called in a trainer's, whose interpreter is
its own business."""

import gc
import sys
from typing import Final

THRESHOLDS: Final = (10_000, 10, 10)
"""Objects that are new, on balance, before the youngest are looked at (0.4 ms); and how often that
happens before older ones are, too. Python's own 700 is less than one step of 256 requests makes."""

SWITCH_INTERVAL_S: Final = 0.0005
"""How long the device thread waits for the interpreter when the event loop has much to do. Python's
own 5 ms are many steps of a small model: 64 streams of one with 260,000 parameters are answered 7 %
faster, and a replica that shares its process with a busy front end keeps up with the others."""


def settle_interpreter() -> None:
    """Once this rank is ready."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _settle_collector()


def _settle_collector() -> None:
    """What exists by now, modules mostly, is never looked at again; what requests leave behind is,
    in thousands.

    Else a full collection walks 270,000 objects of torch and others: 0.1 s and more, in the middle
    of a step. For the same reason none precedes the freezing; of what the start has left behind,
    the oldest (2 MB where kernels were compiled) stays.
    """
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
