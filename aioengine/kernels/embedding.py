"""Rows of a weight: what stands for token ids. Needs numba.

Shapes: T tokens · O rows of the weight · I features of a row, in groups of 32 where it is packed.
"""

from typing import Any, Final

import numpy as np
from numba import carray

from aioengine.kernels.codegen import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ceil_div,
    copy_element,
    element_bytes,
    inlined,
    kernel,
    load_element,
    pointer,
    store_element,
)
from aioengine.kernels.programs import op
from aioengine.kernels.quantized import KINDS
from aioengine.kernels.quantized_tiles import GROUP, TILE
from aioengine.kernels.team import Team, run_job

TOKENS_PER_CHUNK: Final = 16
_CHUNK_BYTES: Final = 4
"""Neighbouring codes of one row of a packed weight."""
_JOB: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "ids",  # int64 [T]
            "num_tokens",
            "weight",
            "first",  # the id of the weight's first row
            "num_rows",
            "num_features",
            "bits",  # of a code; 0 if the weight is of the result's type
            "has_float32_scales",
            "out",  # [T, I]
            "out_kind",  # a place in KINDS
        )
    ]
)


@inlined
def _copy_row(kind: Any, job: Any, row: int, out: int) -> None:
    size = element_bytes(kind)
    source = job.weight + row * job.num_features * size
    for i in range(job.num_features):
        copy_element(kind, source + i * size, out + i * size)


@inlined
def _code(job: Any, codes: int, i: int) -> Any:
    """The i-th of a group's, of a row whose first codes are at `codes`."""
    byte = i % 16 if job.bits == 4 else i
    at = codes + byte // _CHUNK_BYTES * _CHUNK_BYTES * TILE + byte % _CHUNK_BYTES
    if job.bits == 8:
        return np.float32(carray(pointer(at), 1, np.int8)[0])
    both = carray(pointer(at), 1, np.uint8)[0]
    return np.float32(both & 15 if i < 16 else both >> 4)


@inlined
def _unpack_row(kind: Any, scale_kind: Any, job: Any, row: int, out: int) -> None:
    """Code · scale, and for 4 bits, behind that, + minimum; in float32."""
    size, scale_bytes = element_bytes(kind), element_bytes(scale_kind)
    scales_bytes = TILE * scale_bytes
    codes_at = scales_bytes * (2 if job.bits == 4 else 1)
    block_bytes = codes_at + TILE * GROUP * job.bits // 8
    num_groups = ceil_div(job.num_features, GROUP)
    tile, lane = divmod(row, TILE)
    for group in range(num_groups):
        block = job.weight + (tile * num_groups + group) * block_bytes
        scale = load_element(scale_kind, block + lane * scale_bytes)
        minimum = np.float32(0.0)
        if job.bits == 4:
            minimum = load_element(scale_kind, block + scales_bytes + lane * scale_bytes)
        codes = block + codes_at + lane * _CHUNK_BYTES
        for i in range(min(GROUP, job.num_features - group * GROUP)):
            value = _code(job, codes, i) * scale + minimum
            store_element(kind, value, out + (group * GROUP + i) * size)


@inlined
def _row(kind: Any, job: Any, token: int) -> None:
    ids = carray(pointer(job.ids), job.num_tokens, np.int64)
    row = ids[token] - job.first
    out = job.out + token * job.num_features * element_bytes(kind)
    if row < 0 or row >= job.num_rows:
        for i in range(job.num_features):
            store_element(kind, np.float32(0.0), out + i * element_bytes(kind))
    elif job.bits == 0:
        _copy_row(kind, job, row, out)
    elif job.has_float32_scales:
        _unpack_row(kind, FLOAT32, job, row, out)
    else:
        _unpack_row(kind, FLOAT16, job, row, out)


@kernel
def _look_up(args: int, chunk: int, thread: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    first = chunk * TOKENS_PER_CHUNK
    for token in range(first, min(first + TOKENS_PER_CHUNK, job.num_tokens)):
        if job.out_kind == 0:
            _row(FLOAT32, job, token)
        elif job.out_kind == 1:
            _row(BFLOAT16, job, token)
        else:
            _row(FLOAT16, job, token)


@op
def _run(
    control: int,
    num_helpers: int,
    kernel_address: int,
    args: int,
    ids: int,
    num_tokens: int,
    weight: int,
    first: int,
    num_rows: int,
    num_features: int,
    bits: int,
    has_float32_scales: int,
    out: int,
) -> None:
    """Fills the record, which has `out_kind`, and does what it says."""
    job = carray(pointer(args), 1, _JOB)[0]
    job.ids, job.num_tokens = ids, num_tokens
    job.weight, job.first = weight, first
    job.num_rows, job.num_features = num_rows, num_features
    job.bits, job.has_float32_scales = bits, has_float32_scales
    job.out = out
    num_chunks = ceil_div(num_tokens, TOKENS_PER_CHUNK)
    run_job(control, num_helpers, kernel_address, args, num_chunks)


class Embedding:
    """Rows of weights, as one type, on a team's threads. One call at a time."""

    def __init__(self, team: Team, kind: Any) -> None:
        self._team = team  # lives as long as its handle is used
        self._job = np.zeros(1, _JOB)
        self._job["out_kind"] = KINDS.index(kind)
        self._fixed = (*team.handle, _look_up.address, self._job.ctypes.data)

    def __call__(
        self,
        ids: int,
        num_tokens: int,
        weight: int,
        first: int,
        num_rows: int,
        num_features: int,
        bits: int,
        has_float32_scales: bool,
        out: int,
    ) -> None:
        """Addresses of int64 ids [T], of the weight (of 4 or 8 bits, else of this type: 0), whose
        first row is that of id `first`, and of the result [T, I]. Ids beyond give zeros."""
        self._team.call(
            _run,
            *self._fixed,
            ids,
            num_tokens,
            weight,
            first,
            num_rows,
            num_features,
            bits,
            int(has_float32_scales),
            out,
        )
