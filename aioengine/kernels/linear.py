"""Products y = x · Wᵀ + bias over weights as they lie: [O, I] in bfloat16, float16 or float32.

Shapes: T rows of x · I input features · O output features.

**A chunk** is a block of outputs of a block of rows. Its tiles read weights in one of three forms:

- bfloat16 as they lie, where the processor has dot products of them (see dots.py).
- Otherwise (see tiles.py) as they lie, widened to float32 on the way. For few rows: the memory's
  speed is the limit, and the rows after the first find the block in cache.
- Or unpacked to float32, the chunk's block at once, with the same results. For many rows, which
  share that work.

A row's results are the same to the last bit whatever other rows there are and however many threads.
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
    load_element,
    pointer,
)
from aioengine.kernels.dots import HAS_DOTS, MAX_DOT_INPUTS, MAX_DOT_ROWS, multiply_by_dots
from aioengine.kernels.programs import op
from aioengine.kernels.team import Team, run_job
from aioengine.kernels.tiles import BLOCK_OUTPUTS, UNIT, multiply_block, round_row, unpack

MAX_BLOCK_ROWS: Final = 256
MAX_BLOCK_INPUTS: Final = 1024
"""A tile's rows and outputs over this many inputs, as float32, fit the first-level cache."""
UNPACKED_ROWS: Final = 16
"""From here on weights are unpacked."""
ROWS_PER_CHUNK: Final = 16
"""When many rows of x are brought into the form that tiles read."""

_JOB: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x",  # as tiles read it: bfloat16 as it lies, or float32 in units, [T, x_bytes]
            "x_bytes",
            "own_x",  # memory for it
            "raw_x",  # what it is made from, [T, raw_x_bytes]
            "raw_x_bytes",
            "weight",
            "bias",  # 0 without
            "out",
            "out_bytes",  # of a row
            "out_is_float32",  # else of the weight's type
            "num_rows",
            "num_inputs",
            "num_outputs",
            "block_rows",
            "block_inputs",
            "unpacks",
            "scratch",  # [threads, _SCRATCH_BYTES]
        )
    ]
)
_SUMS_BYTES: Final = MAX_BLOCK_ROWS * BLOCK_OUTPUTS * 4
_SCRATCH_BYTES: Final = _SUMS_BYTES + BLOCK_OUTPUTS * MAX_BLOCK_INPUTS * 4


@inlined
def _block_of(job: Any, chunk: int) -> tuple[int, int, int, int]:
    """First row and output of a chunk's block, and how many of each."""
    row_block, output_block = divmod(chunk, ceil_div(job.num_outputs, BLOCK_OUTPUTS))
    row, output = row_block * job.block_rows, output_block * BLOCK_OUTPUTS
    num_rows = min(job.block_rows, job.num_rows - row)
    return row, output, num_rows, min(BLOCK_OUTPUTS, job.num_outputs - output)


@inlined
def _start_sums(kind: Any, bias: int, num_rows: int, num_outputs: int, sums: int) -> None:
    """With the bias of the block's outputs, if its address is not 0."""
    table = carray(pointer(sums), (num_rows, BLOCK_OUTPUTS), np.float32)
    table[:] = 0.0
    if bias:
        for output in range(num_outputs):
            value = load_element(kind, bias + output * element_bytes(kind))
            for row in range(num_rows):
                table[row, output] = value


@inlined
def _round_sums(
    kind: Any, job: Any, row: int, output: int, num_rows: int, num_outputs: int, sums: int
) -> None:
    """To where the block's results belong."""
    for i in range(num_rows):
        source = sums + i * BLOCK_OUTPUTS * 4
        out = job.out + (row + i) * job.out_bytes
        if job.out_is_float32:
            round_row(FLOAT32, source, num_outputs, out + output * 4)
        else:
            round_row(kind, source, num_outputs, out + output * element_bytes(kind))


@inlined
def _product(kind: Any, args: int, chunk: int, thread: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    size = element_bytes(kind)
    row, output, num_rows, num_outputs = _block_of(job, chunk)
    weight_bytes = job.num_inputs * size
    sums = job.scratch + thread * _SCRATCH_BYTES
    unpacked = sums + _SUMS_BYTES
    bias = job.bias + output * size if job.bias else 0
    _start_sums(kind, bias, num_rows, num_outputs, sums)
    for first in range(0, job.num_inputs, job.block_inputs):
        count = min(job.block_inputs, job.num_inputs - first)
        units = ceil_div(count, UNIT)
        x = job.x + row * job.x_bytes + first * 4
        weight = job.weight + output * weight_bytes + first * size
        if job.unpacks:
            unpacked_bytes = units * UNIT * 4
            end = unpacked + num_outputs * unpacked_bytes
            for i in range(num_outputs):
                unpack(kind, weight + i * weight_bytes, count, unpacked + i * unpacked_bytes)
            multiply_block(
                FLOAT32,
                num_rows,
                num_outputs,
                x,
                job.x_bytes,
                unpacked,
                unpacked_bytes,
                end,
                units,
                sums,
            )
        else:
            end = job.weight + job.num_outputs * weight_bytes
            multiply_block(
                kind,
                num_rows,
                num_outputs,
                x,
                job.x_bytes,
                weight,
                weight_bytes,
                end,
                units,
                sums,
            )
    _round_sums(kind, job, row, output, num_rows, num_outputs, sums)


@inlined
def _product_by_dots(args: int, chunk: int, thread: int) -> None:
    """Of bfloat16, with x and the weight as they lie."""
    job = carray(pointer(args), 1, _JOB)[0]
    row, output, num_rows, num_outputs = _block_of(job, chunk)
    weight_bytes = job.num_inputs * 2
    sums = job.scratch + thread * _SCRATCH_BYTES
    bias = job.bias + output * 2 if job.bias else 0
    _start_sums(BFLOAT16, bias, num_rows, num_outputs, sums)
    multiply_by_dots(
        num_rows,
        num_outputs,
        job.num_inputs,
        job.block_inputs,
        job.x + row * job.x_bytes,
        job.x_bytes,
        job.weight + output * weight_bytes,
        weight_bytes,
        job.weight + job.num_outputs * weight_bytes,
        sums,
    )
    _round_sums(BFLOAT16, job, row, output, num_rows, num_outputs, sums)


@inlined
def _unpack_rows(kind: Any, args: int, chunk: int) -> None:
    """ROWS_PER_CHUNK rows of x."""
    job = carray(pointer(args), 1, _JOB)[0]
    for row in range(chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, job.num_rows)):
        source = job.raw_x + row * job.raw_x_bytes
        unpack(kind, source, job.num_inputs, job.x + row * job.x_bytes)


@kernel
def _multiply_float32(args: int, chunk: int, thread: int) -> None:
    _product(FLOAT32, args, chunk, thread)


@kernel
def _multiply_bfloat16(args: int, chunk: int, thread: int) -> None:
    _product(BFLOAT16, args, chunk, thread)


@kernel
def _dot_bfloat16(args: int, chunk: int, thread: int) -> None:
    _product_by_dots(args, chunk, thread)


@kernel
def _multiply_float16(args: int, chunk: int, thread: int) -> None:
    _product(FLOAT16, args, chunk, thread)


@kernel
def _unpack_float32(args: int, chunk: int, thread: int) -> None:
    _unpack_rows(FLOAT32, args, chunk)


@kernel
def _unpack_bfloat16(args: int, chunk: int, thread: int) -> None:
    _unpack_rows(BFLOAT16, args, chunk)


@kernel
def _unpack_float16(args: int, chunk: int, thread: int) -> None:
    _unpack_rows(FLOAT16, args, chunk)


# Without a kernel that unpacks, x is read as it lies.
_KERNELS: Final[dict[Any, Any]] = {
    FLOAT32: (_unpack_float32, _multiply_float32),
    BFLOAT16: (None, _dot_bfloat16) if HAS_DOTS else (_unpack_bfloat16, _multiply_bfloat16),
    FLOAT16: (_unpack_float16, _multiply_float16),
}


@op
def _run(
    control: int,
    num_helpers: int,
    unpack_kernel: int,
    multiply_kernel: int,
    args: int,
    raw_x: int,
    raw_x_bytes: int,
    weight: int,
    bias: int,
    out: int,
    out_size: int,
    size: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    """Fills the record, which has `own_x` and `scratch`, and does what it says: in one call, as
    each from Python costs as much as a small product."""
    job = carray(pointer(args), 1, _JOB)[0]
    job.raw_x = raw_x
    job.raw_x_bytes = raw_x_bytes
    job.weight = weight
    job.bias = bias
    job.out = out
    job.out_bytes = num_outputs * out_size
    job.out_is_float32 = out_size == 4
    job.num_rows = num_rows
    job.num_inputs = num_inputs
    job.num_outputs = num_outputs
    by_dots = unpack_kernel == 0
    blocks = ceil_div(num_inputs, MAX_DOT_INPUTS if by_dots else MAX_BLOCK_INPUTS)
    job.block_inputs = ceil_div(ceil_div(num_inputs, blocks), UNIT) * UNIT
    blocks = ceil_div(num_rows, MAX_DOT_ROWS if by_dots else MAX_BLOCK_ROWS)
    job.block_rows = ceil_div(num_rows, blocks)
    has_whole_units = num_inputs % UNIT == 0
    job.unpacks = not has_whole_units or (num_rows >= UNPACKED_ROWS and size != 4)
    if by_dots or (has_whole_units and size == 4):
        job.x, job.x_bytes = raw_x, raw_x_bytes
    else:
        job.x, job.x_bytes = job.own_x, ceil_div(num_inputs, UNIT) * UNIT * 4
        run_job(control, num_helpers, unpack_kernel, args, ceil_div(num_rows, ROWS_PER_CHUNK))
    num_chunks = blocks * ceil_div(num_outputs, BLOCK_OUTPUTS)
    run_job(control, num_helpers, multiply_kernel, args, num_chunks)


class Linear:
    """Products of one type on a team's threads, with the memory they need. One at a time."""

    def __init__(self, team: Team, kind: Any) -> None:
        self._team = team  # lives as long as its handle is used
        self._size = np.dtype(kind).itemsize
        self._job = np.zeros(1, _JOB)
        unpack_kernel, multiply_kernel = _KERNELS[kind]
        self._unpacks = unpack_kernel is not None
        addresses = unpack_kernel.address if self._unpacks else 0, multiply_kernel.address
        self._fixed = (*team.handle, *addresses, self._job.ctypes.data)
        self._scratch, self._job["scratch"] = _aligned(team.num_threads * _SCRATCH_BYTES)
        self._x_bytes = 0

    def __call__(
        self,
        x: int,
        x_bytes: int,
        weight: int,
        bias: int,
        out: int,
        out_size: int,
        num_rows: int,
        num_inputs: int,
        num_outputs: int,
    ) -> None:
        """Addresses of x [T, I] with rows `x_bytes` apart, the weight [O, I], the bias [O] or 0,
        and the result [T, O]. All of this product's type; the result float32 where `out_size`, the
        bytes of an element, is 4."""
        needed = num_rows * (num_inputs + UNIT) * 4
        if self._unpacks and needed > self._x_bytes:
            self._x, self._job["own_x"] = _aligned(needed)
            self._x_bytes = needed
        self._team.call(
            _run,
            *self._fixed,
            x,
            x_bytes,
            weight,
            bias,
            out,
            out_size,
            self._size,
            num_rows,
            num_inputs,
            num_outputs,
        )


def _aligned(num_bytes: int) -> tuple[Any, int]:
    """Memory that begins with a cache line, and its address."""
    memory = np.empty(num_bytes + 64, np.uint8)
    return memory, memory.ctypes.data + -memory.ctypes.data % 64
