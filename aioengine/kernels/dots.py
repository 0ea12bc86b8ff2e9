"""Tiles of bfloat16 by the processor's dot products: rows of x · outputs of a weight [O, I].

Both are read as they lie; nothing is widened or copied, so that few rows take as long as reading
the weight does, and many rows reach the rate of the instruction.

**The instruction**, vdpbf16ps, adds to each of 16 float32 two products of bfloat16: first of the
odd elements, then of the even ones, rounded to nearest after each, as by two fused operations.
Denormal numbers, read or computed, count as 0; infinities and NaN are as usual.

**Order of sums.** Lanes are added up at the end of each block of I. It follows from I alone,
whatever the tile.

**Order of tiles.** The weights of a tile stay in the first-level cache while the rows of x go by.
Meanwhile those of the next tile are asked for, evenly, so that memory is never waited for when
there is enough to compute: from about 8 rows on.
"""

from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from aioengine.kernels.codegen import FEATURES, I16, I32, I64, Code, inlined
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
_TILES_AHEAD: Final = 2
"""Of the one that is computed, memory is asked for weights."""
_CACHED_BYTES: Final = 2**19
"""Of x, which stay in the second-level cache beside the weights that pass."""
_LANES: Final = 16
_UNIT: Final = 2 * _LANES
_INT: Final = types.int64
_I1: Final = ir.IntType(1)


class _Operands(NamedTuple):
    """Of a tile, in IR: addresses of x and the weight (bfloat16) and of sums (float32), and bytes
    from row to row. The last of `num_outputs` fills up the tile. In each unit _OUTPUTS lines from
    `coming` on are asked for, and `coming_bytes` further on in the next."""

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


def _sum_lanes(code: Code, totals: list[Any]) -> list[Any]:
    """The sums of up to 16 vectors, in fours. Lanes are added that are 8, then 4, 2, 1 apart; each
    addition leaves half of the lanes to another vector."""
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
    return [_lanes_of(code, sums, sums, places[i : i + 4]) for i in range(0, len(totals), 4)]


def _lanes_of(code: Code, a: Any, b: Any, lanes: list[int]) -> Any:
    return code.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _emit_tile(code: Code, rows: int, given: _Operands) -> None:
    """Adds the products of so many rows and _OUTPUTS outputs to the sums."""
    builder = code.builder

    def row_at(base: Any, row: Any, row_bytes: Any) -> Any:
        return builder.add(base, builder.mul(row_bytes, row))

    last = builder.sub(given.num_outputs, code.const(1))
    outputs = [
        code.call("llvm.smin.i64", I64, code.const(output), last) for output in range(_OUTPUTS)
    ]
    weights = [row_at(given.weight, output, given.weight_bytes) for output in outputs]
    x_rows = [row_at(given.x, code.const(row), given.x_bytes) for row in range(rows)]

    def add(load: Any, at: Any, totals: list[Any]) -> list[Any]:
        units = [load(builder.add(weight, at)) for weight in weights]
        results = []
        for row, x_row in enumerate(x_rows):
            value = load(builder.add(x_row, at))
            for output, unit in enumerate(units):
                total = totals[row * _OUTPUTS + output]
                # LLVM 20 and older know it by these types, newer ones translate them.
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                results.append(code.call(name, code.floats, total, unit, value))
        return results

    def add_whole(i: Any, totals: list[Any]) -> list[Any]:
        coming = builder.add(given.coming, builder.mul(i, given.coming_bytes))
        for line in range(_OUTPUTS):
            prefetch(code, builder.add(coming, code.const(line * LINE_BYTES)), 2)
        return add(
            lambda at: code.load(at, code.ints), builder.mul(i, code.const(2 * _UNIT)), totals
        )

    whole = builder.udiv(given.num_inputs, code.const(_UNIT))
    rest = builder.urem(given.num_inputs, code.const(_UNIT))
    rest_at = builder.mul(whole, code.const(2 * _UNIT))
    totals = code.loop(whole, [code.zero] * (rows * _OUTPUTS), add_whole)
    totals = code.loop(
        builder.zext(builder.icmp_signed("!=", rest, code.const(0)), I64),
        totals,
        lambda _, totals: add(lambda at: _load_first(code, at, rest), rest_at, totals),
    )
    for row, four in enumerate(_sum_lanes(code, totals)):
        at = row_at(given.sums, code.const(row), given.sums_bytes)
        code.store(builder.fadd(code.load(at, four.type), four), at)


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
        code.for_each_count(num_rows, _ROWS, lambda rows: _emit_tile(code, rows, given))
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
    num_tiles = _blocks(num_rows, _ROWS)
    tile_bytes = _OUTPUTS * weight_bytes
    # Weights are read in the order of their addresses as long as x stays in cache.
    step = _OUTPUTS if num_rows * x_bytes <= _CACHED_BYTES else num_outputs
    for start in range(0, num_outputs, step):
        for first in range(0, num_inputs, block_inputs):
            count = min(block_inputs, num_inputs - first)
            for output in range(start, min(start + step, num_outputs), _OUTPUTS):
                here = weight + output * weight_bytes
                coming = here + _TILES_AHEAD * tile_bytes
                if coming + tile_bytes > end:
                    coming = here
                _multiply_rows(
                    num_rows,
                    num_tiles,
                    num_outputs - output,
                    count,
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
    num_tiles: int,
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
    lines = _blocks(_OUTPUTS, num_tiles)
    lines_bytes = _blocks(num_inputs, _UNIT) * lines * LINE_BYTES
    row = 0
    for tile in range(num_tiles):
        rows = _blocks(num_rows - row, num_tiles - tile)
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
            sums + row * BLOCK_OUTPUTS * 4,
            BLOCK_OUTPUTS * 4,
        )
        row += rows


@inlined
def _blocks(count: int, size: int) -> int:
    return (count + size - 1) // size
