"""Cosines and sines of rotary angles. Needs numba.

An angle is the float32 product of position and frequency. It is cut to a quarter turn and both
functions are summed up in float64, so that what is rounded to float32 is the nearest one for angles
up to ten million.

Shapes: T tokens · F frequencies.
"""

from typing import Any, Final

import numpy as np
from numba import carray

from aioengine.kernels.codegen import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ceil_div,
    element_bytes,
    inlined,
    kernel,
    pointer,
    store_element,
)
from aioengine.kernels.programs import op
from aioengine.kernels.team import Team, run_job

TOKENS_PER_CHUNK: Final = 32
_QUARTERS: Final = 2 / np.pi
_QUARTER: Final = 1.5707963267948966
_QUARTER_REST: Final = 6.123233995736766e-17
"""What π / 2 has beyond float64."""
_JOB: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "positions",  # int64 [T]
            "frequencies",  # float32 [F]
            "cos",  # [T, F]
            "sin",
            "num_tokens",
            "num_frequencies",
        )
    ]
)


@inlined
def _cos_sin(angle: Any) -> Any:
    """Taylor series, right to 1e-11 for up to π / 4."""
    quarters = np.rint(angle * _QUARTERS)
    x = (angle - quarters * _QUARTER) - quarters * _QUARTER_REST
    y = x * x
    sin = y * (1 / 6227020800.0) - 1 / 39916800.0
    sin = ((sin * y + 1 / 362880.0) * y - 1 / 5040.0) * y + 1 / 120.0
    sin = x + x * y * (sin * y - 1 / 6.0)
    cos = 1 / 479001600.0 - y * (1 / 87178291200.0)
    cos = ((cos * y - 1 / 3628800.0) * y + 1 / 40320.0) * y - 1 / 720.0
    cos = 1.0 + y * ((cos * y + 1 / 24.0) * y - 0.5)
    quadrant = int(quarters) & 3
    if quadrant & 1:
        cos, sin = sin, cos
    return (-cos if quadrant in (1, 2) else cos), (-sin if quadrant & 2 else sin)


@inlined
def _angles(kind: Any, args: int, chunk: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    size = element_bytes(kind)
    positions = carray(pointer(job.positions), job.num_tokens, np.int64)
    frequencies = carray(pointer(job.frequencies), job.num_frequencies, np.float32)
    first = chunk * TOKENS_PER_CHUNK
    for token in range(first, min(first + TOKENS_PER_CHUNK, job.num_tokens)):
        position = np.float32(positions[token])
        for i in range(job.num_frequencies):
            cos, sin = _cos_sin(np.float64(position * frequencies[i]))
            place = (token * job.num_frequencies + i) * size
            store_element(kind, np.float32(cos), job.cos + place)
            store_element(kind, np.float32(sin), job.sin + place)


@kernel
def _angles_float32(args: int, chunk: int, thread: int) -> None:
    _angles(FLOAT32, args, chunk)


@kernel
def _angles_bfloat16(args: int, chunk: int, thread: int) -> None:
    _angles(BFLOAT16, args, chunk)


@kernel
def _angles_float16(args: int, chunk: int, thread: int) -> None:
    _angles(FLOAT16, args, chunk)


_KERNELS: Final[dict[Any, Any]] = {
    FLOAT32: _angles_float32,
    BFLOAT16: _angles_bfloat16,
    FLOAT16: _angles_float16,
}


@op
def _run(
    control: int,
    num_helpers: int,
    kernel_address: int,
    args: int,
    positions: int,
    frequencies: int,
    cos: int,
    sin: int,
    num_tokens: int,
    num_frequencies: int,
) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    job.positions, job.frequencies = positions, frequencies
    job.cos, job.sin = cos, sin
    job.num_tokens, job.num_frequencies = num_tokens, num_frequencies
    num_chunks = ceil_div(num_tokens, TOKENS_PER_CHUNK)
    run_job(control, num_helpers, kernel_address, args, num_chunks)


class Angles:
    """These kernels for one type, on a team's threads. One call at a time."""

    def __init__(self, team: Team, kind: Any) -> None:
        self._team = team  # lives as long as its handle is used
        self._job = np.zeros(1, _JOB)
        self._fixed = (*team.handle, _KERNELS[kind].address, self._job.ctypes.data)

    def __call__(
        self,
        positions: int,
        frequencies: int,
        cos: int,
        sin: int,
        num_tokens: int,
        num_frequencies: int,
    ) -> None:
        """Addresses of int64 positions [T] of 0 or more, float32 frequencies [F], and the results
        [T, F]."""
        self._team.call(
            _run, *self._fixed, positions, frequencies, cos, sin, num_tokens, num_frequencies
        )
