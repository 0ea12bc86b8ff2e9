"""Products with weights of 8 and 4 bits, straight from their blocks. Needs numba.

Shapes: R rows of x · I inputs · G groups of 32 inputs · O outputs, in tiles of 16.

Rows of x are prepared once, as quantized_tiles.py wants them, then each chunk of the job computes
some tiles for some rows. A row's results are the same to the last bit whatever other rows there are
and however many threads.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    BFLOAT16,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    I8,
    I32,
    IR_TYPES,
    Code,
    ceil_div,
    element_bytes,
    fill_floats,
    inlined,
    kernel,
    load_element,
    pointer,
    store_element,
)
from aioengine.kernels.programs import op
from aioengine.kernels.quantized_tiles import (
    GROUP,
    INT4_BLOCK_BYTES,
    INT4_WIDE_BLOCK_BYTES,
    INT8_BLOCK_BYTES,
    INTEGERS,
    MAX_ROWS,
    TILE,
    UNSIGNED,
    X_BYTES,
    X_SCALE,
    X_START,
    X_SUM,
    tile_of,
)
from aioengine.kernels.team import Team, run_job

PANEL_ROWS: Final = 128
PANEL_BYTES: Final = 1 << 19
"""Of the rows of x that a chunk works on, at most: they stay in a core's second-level cache."""
CHUNKS_PER_THREAD: Final = 4
PREPARED_ROWS: Final = 16
"""Rows of x that are prepared in a chunk."""
LARGEST_CODE: Final = 127
_SCRATCH_BYTES: Final = MAX_ROWS * TILE * 4
_INT: Final = types.int64

_JOB: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "raw_x",  # [R, raw_x_bytes], of raw_kind
            "raw_x_bytes",
            "raw_kind",  # a place in KINDS
            "num_rows",
            "num_inputs",
            "num_outputs",
            "num_groups",
            "num_tiles",
            "tiles_per_chunk",
            "panel_rows",
            "blocks",
            "x",  # blocks in strips
            "x_bytes",  # of a block
            "out",  # [R, O], of out_kind
            "out_kind",
            "scratch",  # _SCRATCH_BYTES for each thread
        )
    ]
)
KINDS: Final = (FLOAT32, BFLOAT16, FLOAT16)


# --- rows of x ------------------------------------------------------------------------------------


@intrinsic
def _round_group(typing: Any, kind: Any, values: Any, block: Any) -> Any:
    """32 elements become a block of x by integers: codes -127…127, and what goes with them.

    A value that is not finite makes the scale so, too.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, values, block = args
        code = Code(builder, GROUP)
        x = code.load_elements(values, IR_TYPES[kind.dtype])
        # As integers, the bits of positive floats are in the order of these; NaN is the largest.
        sizes = builder.and_(builder.bitcast(x, code.ints), code.fill(0x7FFFFFFF))
        largest = code.call(f"llvm.vector.reduce.smax.v{GROUP}i32", I32, sizes)
        largest = builder.bitcast(largest, F32)
        limit, nothing = ir.Constant(F32, LARGEST_CODE), ir.Constant(F32, 0.0)
        is_zero = builder.fcmp_ordered("==", largest, nothing)
        inverse = builder.select(is_zero, nothing, builder.fdiv(limit, largest))
        scaled = builder.fmul(x, code.splat(inverse))
        rounded = code.call(f"llvm.rint.v{GROUP}f32", code.floats, scaled)
        top = code.fill(float(LARGEST_CODE))
        is_number = builder.fcmp_ordered("<=", rounded, top)  # what NaN is not
        numbers = builder.fptosi(builder.select(is_number, rounded, code.zero), code.ints)
        code.store(builder.trunc(numbers, ir.VectorType(I8, GROUP)), block)
        total = code.call(f"llvm.vector.reduce.add.v{GROUP}i32", I32, numbers)
        scale = builder.fdiv(largest, limit)
        scaled_total = builder.fmul(builder.sitofp(total, F32), scale)
        start = builder.mul(total, I32(-UNSIGNED))
        for value, at in ((scale, X_SCALE), (scaled_total, X_SUM[True]), (start, X_START)):
            code.store(value, builder.add(block, code.const(at)))
        return context.get_dummy_value()

    return types.void(kind, _INT, _INT), generate


@intrinsic
def _widen_group(typing: Any, kind: Any, values: Any, block: Any) -> Any:
    """32 elements become a block of x by floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, values, block = args
        code = Code(builder, GROUP)
        x = code.load_elements(values, IR_TYPES[kind.dtype])
        code.store(x, block)
        code.store(code.sum_lanes(x), builder.add(block, code.const(X_SUM[False])))
        return context.get_dummy_value()

    return types.void(kind, _INT, _INT), generate


@inlined
def _job(args: int) -> Any:
    return carray(pointer(args), 1, _JOB)[0]


@inlined
def _prepare_group(kind: Any, values: int, block: int, by_integers: bool) -> None:
    if by_integers:
        _round_group(kind, values, block)
    else:
        _widen_group(kind, values, block)


@inlined
def _prepare_row(kind: Any, args: int, row: int, thread: int, by_integers: bool) -> None:
    job, size = _job(args), element_bytes(kind)
    first = row // MAX_ROWS * MAX_ROWS
    num_rows = min(MAX_ROWS, job.num_rows - first)  # of its strip
    values = job.raw_x + row * job.raw_x_bytes
    block = job.x + (first * job.num_groups + row - first) * job.x_bytes
    for _ in range(job.num_inputs // GROUP):
        _prepare_group(kind, values, block, by_integers)
        values += GROUP * size
        block += num_rows * job.x_bytes
    rest = job.num_inputs % GROUP
    if rest:
        filled = job.scratch + thread * _SCRATCH_BYTES
        fill_floats(filled, GROUP, 0.0)
        for i in range(rest):
            store_element(FLOAT32, load_element(kind, values + i * size), filled + i * 4)
        _prepare_group(FLOAT32, filled, block, by_integers)


@inlined
def _prepare(args: int, chunk: int, thread: int, by_integers: bool) -> None:
    job = _job(args)
    for row in range(chunk * PREPARED_ROWS, min((chunk + 1) * PREPARED_ROWS, job.num_rows)):
        if job.raw_kind == 0:
            _prepare_row(FLOAT32, args, row, thread, by_integers)
        elif job.raw_kind == 1:
            _prepare_row(BFLOAT16, args, row, thread, by_integers)
        else:
            _prepare_row(FLOAT16, args, row, thread, by_integers)


@kernel
def _to_integers(args: int, chunk: int, thread: int) -> None:
    _prepare(args, chunk, thread, True)


@kernel
def _to_floats(args: int, chunk: int, thread: int) -> None:
    _prepare(args, chunk, thread, False)


# --- products -------------------------------------------------------------------------------------


@intrinsic
def _store_tile(typing: Any, kind: Any, source: Any, out: Any) -> Any:
    """16 float32 as elements."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(builder, TILE)
        code.store_elements(code.load(args[1]), args[2], IR_TYPES[kind.dtype])
        return context.get_dummy_value()

    return types.void(kind, _INT, _INT), generate


@inlined
def _write(kind: Any, source: int, out: int, count: int) -> None:
    if count == TILE:
        _store_tile(kind, source, out)
        return
    for i in range(count):
        value = load_element(FLOAT32, source + i * 4)
        store_element(kind, value, out + i * element_bytes(kind))


@inlined
def _multiply(products: Any, block_bytes: int, args: int, chunk: int, thread: int) -> None:
    """`products` of one tile."""
    job = _job(args)
    panel, part = divmod(chunk, ceil_div(job.num_tiles, job.tiles_per_chunk))
    first_tile, first_row = part * job.tiles_per_chunk, panel * job.panel_rows
    scratch = job.scratch + thread * _SCRATCH_BYTES
    for tile in range(first_tile, min(job.num_tiles, first_tile + job.tiles_per_chunk)):
        blocks = job.blocks + tile * job.num_groups * block_bytes
        count = min(TILE, job.num_outputs - tile * TILE)
        for row in range(first_row, min(job.num_rows, first_row + job.panel_rows), MAX_ROWS):
            num_rows = min(MAX_ROWS, job.num_rows - row)
            strip = job.x + row * job.num_groups * job.x_bytes
            products(num_rows, job.num_groups, blocks, strip, scratch)
            for i in range(num_rows):
                place = (row + i) * job.num_outputs + tile * TILE
                source = scratch + i * TILE * 4
                if job.out_kind == 0:
                    _write(FLOAT32, source, job.out + place * 4, count)
                elif job.out_kind == 1:
                    _write(BFLOAT16, source, job.out + place * 2, count)
                else:
                    _write(FLOAT16, source, job.out + place * 2, count)


_int8_floats: Final = tile_of(8, F16, by_integers=False)
_int4_floats: Final = tile_of(4, F16, by_integers=False)
_int4_wide_floats: Final = tile_of(4, F32, by_integers=False)
_int8_integers: Final = tile_of(8, F16, by_integers=True)
_int4_integers: Final = tile_of(4, F16, by_integers=True)


@kernel
def _int8_by_floats(args: int, chunk: int, thread: int) -> None:
    _multiply(_int8_floats, INT8_BLOCK_BYTES, args, chunk, thread)


@kernel
def _int4_by_floats(args: int, chunk: int, thread: int) -> None:
    _multiply(_int4_floats, INT4_BLOCK_BYTES, args, chunk, thread)


@kernel
def _int4_wide_by_floats(args: int, chunk: int, thread: int) -> None:
    _multiply(_int4_wide_floats, INT4_WIDE_BLOCK_BYTES, args, chunk, thread)


@kernel
def _int8_by_integers(args: int, chunk: int, thread: int) -> None:
    _multiply(_int8_integers, INT8_BLOCK_BYTES, args, chunk, thread)


@kernel
def _int4_by_integers(args: int, chunk: int, thread: int) -> None:
    _multiply(_int4_integers, INT4_BLOCK_BYTES, args, chunk, thread)


_BY_FLOATS: Final = {
    (8, False): _int8_by_floats,
    (4, False): _int4_by_floats,
    (4, True): _int4_wide_by_floats,
}
_BY_INTEGERS: Final = {(8, False): _int8_by_integers, (4, False): _int4_by_integers}


@op
def _run(
    control: int,
    num_helpers: int,
    prepare_kernel: int,
    multiply_kernel: int,
    args: int,
    raw_x: int,
    raw_x_bytes: int,
    blocks: int,
    out: int,
    out_kind: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    max_chunks: int,
) -> None:
    """Fills the record, which has `x`, `x_bytes`, `raw_kind` and `scratch`, and does what it
    says."""
    job = _job(args)
    job.raw_x, job.raw_x_bytes = raw_x, raw_x_bytes
    job.blocks, job.out, job.out_kind = blocks, out, out_kind
    job.num_rows, job.num_inputs, job.num_outputs = num_rows, num_inputs, num_outputs
    job.num_groups = ceil_div(num_inputs, GROUP)
    job.num_tiles = ceil_div(num_outputs, TILE)
    job.tiles_per_chunk = ceil_div(job.num_tiles, max_chunks)
    run_job(control, num_helpers, prepare_kernel, args, ceil_div(num_rows, PREPARED_ROWS))
    strips = min(PANEL_ROWS, PANEL_BYTES // (job.num_groups * job.x_bytes)) // MAX_ROWS
    job.panel_rows = max(1, strips) * MAX_ROWS
    num_chunks = ceil_div(num_rows, job.panel_rows) * ceil_div(job.num_tiles, job.tiles_per_chunk)
    run_job(control, num_helpers, multiply_kernel, args, num_chunks)


class QuantizedLinear:
    """Products on a team's threads, with the memory they need, for x of one type. One at a time."""

    def __init__(self, team: Team, kind: Any) -> None:
        self._team = team
        self._by_integers = kind is not FLOAT32 and INTEGERS
        self._kernels = _BY_INTEGERS if self._by_integers else _BY_FLOATS
        self._kind = KINDS.index(kind)
        self._job = np.zeros(1, _JOB)
        self._job["raw_kind"] = self._kind
        self._job["x_bytes"] = X_BYTES[self._by_integers]
        self._scratch = np.empty(team.num_threads * _SCRATCH_BYTES, np.uint8)
        self._job["scratch"] = self._scratch.ctypes.data
        self._prepare = _to_integers if self._by_integers else _to_floats
        self._args = self._job.ctypes.data
        self._max_chunks = CHUNKS_PER_THREAD * team.num_threads if team.num_threads > 1 else 1
        self._num_groups = 0
        """Of x that there is memory for."""

    def __call__(
        self,
        bits: int,
        has_float32_scales: bool,
        x: int,
        x_bytes: int,
        blocks: int,
        out: int,
        out_is_float32: bool,
        num_rows: int,
        num_inputs: int,
        num_outputs: int,
    ) -> None:
        """Addresses of x [R, I] with rows `x_bytes` apart, of blocks, and of the result [R, O], in
        x's type or in float32. Float32 scales are for x in float32 only."""
        self._make_room(num_rows * -(-num_inputs // GROUP))
        self._team.call(
            _run,
            *self._team.handle,
            self._prepare.address,
            self._kernels[bits, has_float32_scales].address,
            self._args,
            x,
            x_bytes,
            blocks,
            out,
            0 if out_is_float32 else self._kind,
            num_rows,
            num_inputs,
            num_outputs,
            self._max_chunks,
        )

    def _make_room(self, num_groups: int) -> None:
        if num_groups <= self._num_groups:
            return
        self._num_groups = num_groups
        self._x = np.empty(num_groups * X_BYTES[self._by_integers], np.uint8)
        self._job["x"] = self._x.ctypes.data
