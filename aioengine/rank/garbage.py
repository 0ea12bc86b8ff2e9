"""Python's cycle collector, kept out of the steps of a process that is ours alone."""

import gc
from typing import Final

THRESHOLDS: Final = (10_000, 10, 10)
"""Objects that are new, on balance, before the youngest are looked at (0.4 ms); and how often that
happens before older ones are, too. Python's own 700 is less than one step of 256 requests makes."""


def settle_collector() -> None:
    """Once this rank is ready. What exists by then, modules mostly, is never looked at again; what
    requests leave behind is, in thousands.

    Else a full collection walks 270,000 objects of torch and others: 0.1 s and more, in the middle
    of a step. For the same reason none precedes the freezing; of what the start has left behind,
    the oldest (2 MB where kernels were compiled) stays. Never called in a trainer's process, whose
    collector is its own business.
    """
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
