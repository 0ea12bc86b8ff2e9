"""The clock, and the processor offered to others, for compiled functions."""

from typing import Any, Final

import numpy as np
from numba import carray, types

from aioengine.kernels.codegen import inlined, pointer

_CLOCK_MONOTONIC: Final = 1

_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@inlined
def now(scratch: int) -> int:
    """CLOCK_MONOTONIC in nanoseconds. `scratch` is the address of two words."""
    _clock_gettime(_CLOCK_MONOTONIC, scratch)
    timespec = carray(pointer(scratch), 2, np.int64)
    return timespec[0] * 1_000_000_000 + timespec[1]
