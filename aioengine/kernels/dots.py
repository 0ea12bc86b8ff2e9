"""Tiles of bfloat16 by the processor's dot products: rows of x · outputs of a weight [O, I].

Both are read as they lie; nothing is widened or copied, so that few rows take as long as reading
the weight does, and many rows reach the rate of the instruction.

**The instruction**, vdpbf16ps, adds to each of 16 float32 two products of bfloat16: first of the
odd elements, then of the even ones, rounded to nearest after each, as two fused operations would.
Denormal numbers, read or computed, count as 0; infinities and NaN are as usual.

**Order of sums.** Lanes are added up at the end of each block of I. It follows from I alone,
whatever the tile.

**Order of tiles.** A few rows meet one output after the other: memory is read in the order of its
addresses, which processors foresee. More rows share what is loaded: the weights of a tile stay in
the first-level cache while the rows go by, in tiles of up to 4. Meanwhile weights to come are asked
for, evenly, so that memory is waited for only where it is slower than all the computing.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from aioengine.kernels.codegen import FEATURES, I16, I32, I64, Code, ceil_div, inlined
from aioengine.kernels.tiles import BLOCK_OUTPUTS, LINE_BYTES, prefetch

HAS_DOTS: Final = "+avx512bf16" in FEATURES
"""Whether the processor has the instruction."""
MAX_DOT_INPUTS: Final = 2048
"""Of a block: the weights of a tile, 16 KiB, stay in the first-level cache."""
MAX_DOT_ROWS: Final = 128
"""Of a block: x, at most 512 KiB, stays in the second-level cache."""
_ROWS: Final = 4
"""Of a tile, at most."""
_OUTPUTS: Final = 4
_READING_ROWS: Final = 2
"""Up to so many meet one output after the other."""
_TILES_AHEAD: Final = 2
"""Of the one that is computed, memory is asked for weights: one ahead, 4.5 KiB for 576 inputs, is
too near for the time that memory takes."""
_CACHED_BYTES: Final = 2**19
"""Of x, which stay in the second-level cache beside the weights that pass."""
_SUMS_BYTES: Final = BLOCK_OUTPUTS * 4
"""From row to row."""
_LANES: Final = 16
_UNIT: Final = 2 * _LANES
_INT: Final = types.int64
_I1: Final = ir.IntType(1)


class _Operands(NamedTuple):
    """Of a tile, in IR: addresses of x and the weight (bfloat16) and of sums (float32), and bytes
    from row to row. Where there are too few outputs the last one fills up the tile.

    In its first unit a tile asks for _OUTPUTS lines from `coming` on, in each other for those that
    are `coming_bytes` further on. Without `coming`, 0, it has one output."""

    num_outputs: Any
    num_inputs: Any
    x: Any
    x_bytes: Any
    weight: Any
    weight_bytes: Any
    coming: Any
    coming_bytes: Any
    sums: Any
    sums_bytes: Any


def _load_first(code: Code, address: Any, count: Any) -> Any:
    """A unit of which only `count` elements are there; zeros behind them."""
    builder = code.builder
    missing = builder.trunc(builder.sub(code.const(_UNIT), count), I32)
    mask = builder.bitcast(builder.lshr(I32(-1), missing), ir.VectorType(_I1, _UNIT))
    unit = ir.VectorType(I16, _UNIT)
    pointer = builder.inttoptr(address, unit.as_pointer())
    zeros = ir.Constant(unit, None)
    found = code.call(f"llvm.masked.load.v{_UNIT}i16.p0", unit, pointer, I32(2), mask, zeros)
    return builder.bitcast(found, code.ints)


def _sum_lanes(code: Code, totals: list[Any], count: int) -> list[Any]:
    """The sums of up to 16 vectors, in vectors of `count`. Lanes are added that are 8, then 4, 2, 1
    apart; each addition leaves half of the lanes to another vector."""
    builder = code.builder
    vectors = totals
    distance = _LANES // 2
    while distance:
        vectors = vectors + vectors[-1:] * (len(vectors) % 2)
        own = [lane + (_LANES if lane & distance else 0) for lane in range(_LANES)]
        other = [lane ^ distance for lane in own]
        vectors = [
            builder.fadd(_lanes_of(code, a, b, own), _lanes_of(code, a, b, other))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        distance //= 2
    (sums,) = vectors
    places = [sum(_LANES // 2 >> bit for bit in range(4) if i >> bit & 1) for i in range(_LANES)]
    return [
        _lanes_of(code, sums, sums, places[i : i + count]) for i in range(0, len(totals), count)
    ]


def _lanes_of(code: Code, a: Any, b: Any, lanes: list[int]) -> Any:
    return code.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _add_dots(code: Code, a: Any, b: Any, totals: Any) -> Any:
    """The instruction. LLVM 20 and older know it by these types, newer ones translate them."""
    return code.call("llvm.x86.avx512bf16.dpbf16ps.512", code.floats, totals, a, b)


def _for_each_unit(
    code: Code, given: _Operands, sums: list[Any], add: Callable[..., list[Any]]
) -> list[Any]:
    """`sums = add(i, load, sums)` for units i, where `load(row)` is the unit of a row."""
    builder = code.builder
    whole = builder.udiv(given.num_inputs, code.const(_UNIT))
    rest = builder.urem(given.num_inputs, code.const(_UNIT))
    has_rest = builder.zext(builder.icmp_signed("!=", rest, code.const(0)), I64)

    def add_whole(i: Any, sums: list[Any]) -> list[Any]:
        return add(i, lambda row: code.load(code.at(row, i, 2 * _UNIT), code.ints), sums)

    def add_rest(_: Any, sums: list[Any]) -> list[Any]:
        return add(whole, lambda row: _load_first(code, code.at(row, whole, 2 * _UNIT), rest), sums)

    return code.loop(has_rest, code.loop(whole, sums, add_whole), add_rest)


def _emit_tile(code: Code, rows: int, outputs: int, given: _Operands) -> None:
    """Adds the products of so many rows and outputs to the sums."""
    builder = code.builder
    last = builder.sub(given.num_outputs, code.const(1))
    x_rows = [
        builder.add(given.x, builder.mul(given.x_bytes, code.const(row))) for row in range(rows)
    ]
    weights = []
    for output in range(outputs):
        output = code.call("llvm.smin.i64", I64, code.const(output), last)
        weights.append(builder.add(given.weight, builder.mul(output, given.weight_bytes)))

    def add(i: Any, load: Callable[[Any], Any], totals: list[Any]) -> list[Any]:
        if outputs > 1:
            coming = builder.add(given.coming, builder.mul(i, given.coming_bytes))
            for line in range(outputs):
                prefetch(code, builder.add(coming, code.const(line * LINE_BYTES)), 2)
        units = [load(weight) for weight in weights]
        values = [load(x_row) for x_row in x_rows]
        products = [(unit, value) for value in values for unit in units]
        return [
            _add_dots(code, *product, total)
            for product, total in zip(products, totals, strict=True)
        ]

    totals = _for_each_unit(code, given, [code.zero] * (rows * outputs), add)
    for row, sums in enumerate(_sum_lanes(code, totals, outputs)):
        at = builder.add(given.sums, builder.mul(given.sums_bytes, code.const(row)))
        code.store(builder.fadd(code.load(at, sums.type), sums), at)


@intrinsic
def _tile(
    typing: Any,
    num_rows: Any,
    num_outputs: Any,
    num_inputs: Any,
    x: Any,
    x_bytes: Any,
    weight: Any,
    weight_bytes: Any,
    coming: Any,
    coming_bytes: Any,
    sums: Any,
    sums_bytes: Any,
) -> Any:
    """See _Operands."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *operands = args
        code, given = Code(builder, _LANES), _Operands(*operands)

        def emit(rows: int) -> None:
            if rows > _READING_ROWS:
                _emit_tile(code, rows, _OUTPUTS, given)
                return
            reads = builder.icmp_signed("==", given.coming, code.const(0))
            with builder.if_else(reads) as (reading, computing):
                with reading:
                    _emit_tile(code, rows, 1, given)
                with computing:
                    _emit_tile(code, rows, _OUTPUTS, given)

        code.for_each_count(num_rows, _ROWS, emit)
        return context.get_dummy_value()

    return types.void(*[_INT] * 11), generate


@inlined
def multiply_by_dots(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    block_inputs: int,
    x: int,
    x_bytes: int,
    weight: int,
    weight_bytes: int,
    end: int,
    sums: int,
) -> None:
    """Adds the products of a block to `sums` [rows, BLOCK_OUTPUTS]; what lies behind `num_outputs`
    there is overwritten. Behind `end` nothing is asked for: to find no page there takes a processor
    longer than a tile."""
    if num_rows <= _READING_ROWS and num_inputs <= block_inputs:
        for output in range(num_outputs):
            here = weight + output * weight_bytes
            at = sums + output * 4
            _tile(num_rows, 1, num_inputs, x, x_bytes, here, weight_bytes, 0, 0, at, _SUMS_BYTES)
        return
    # Weights are read in the order of their addresses as long as x stays in cache.
    step = _OUTPUTS if num_rows * x_bytes <= _CACHED_BYTES else num_outputs
    for start in range(0, num_outputs, step):
        for first in range(0, num_inputs, block_inputs):
            for output in range(start, min(start + step, num_outputs), _OUTPUTS):
                here = weight + output * weight_bytes
                coming = here + _TILES_AHEAD * _OUTPUTS * weight_bytes
                if coming + _OUTPUTS * weight_bytes > end:
                    coming = here
                _multiply_rows(
                    num_rows,
                    num_outputs - output,
                    min(block_inputs, num_inputs - first),
                    x + first * 2,
                    x_bytes,
                    here + first * 2,
                    weight_bytes,
                    coming + _OUTPUTS * first * 2,
                    sums + output * 4,
                )


@inlined
def _multiply_rows(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    x: int,
    x_bytes: int,
    weight: int,
    weight_bytes: int,
    coming: int,
    sums: int,
) -> None:
    """Of all rows and _OUTPUTS outputs: tiles as equal as possible, each of which asks for its part
    of what is coming."""
    num_tiles = ceil_div(num_rows, _ROWS)
    lines = ceil_div(_OUTPUTS, num_tiles)
    lines_bytes = ceil_div(num_inputs, _UNIT) * lines * LINE_BYTES
    row = 0
    for tile in range(num_tiles):
        rows = ceil_div(num_rows - row, num_tiles - tile)
        _tile(
            rows,
            num_outputs,
            num_inputs,
            x + row * x_bytes,
            x_bytes,
            weight,
            weight_bytes,
            coming + (tile * lines_bytes if tile * lines < _OUTPUTS else 0),
            lines * LINE_BYTES,
            sums + row * _SUMS_BYTES,
            _SUMS_BYTES,
        )
        row += rows
