"""Tiles: products of a few rows of x and a few outputs of a weight [O, I], in LLVM IR.

The sums of a tile are vectors that stay in registers while the loop runs over I, and become numbers
by one addition of lanes.

**Units.** The loop's step is a unit of two vectors. Of bfloat16 it is a vector of words with two
elements each: shifted up, a word is the even one, and without its lower half the odd one. So x, as
float32, has the even elements of a unit before its odd ones, and zeros behind the last.

**Order of sums.** It follows from the type and I alone, and is the same whether weights are read as
they lie or were unpacked to float32 before, whatever the tile.

Each tile asks for the weights of the next one, in the order of their addresses: processors foresee
one long stream, and not several short ones.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    BFLOAT16,
    F32,
    I8,
    I16,
    I32,
    I64,
    IR_TYPES,
    NUM_REGISTERS,
    REGISTER_LANES,
    Code,
    bytes_of,
    element_bytes,
    inlined,
    load_element,
    pointer,
    store_element,
)

UNIT: Final = 2 * REGISTER_LANES
BLOCK_OUTPUTS: Final = 48
"""Of the blocks that are cut into tiles: a multiple of every tile's."""

_TILES: Final = (
    {True: (4, 4, 4, 4), False: (4, 4, 4, 4, 4, 4)}
    if NUM_REGISTERS >= 32
    else {True: (4, 4, 3, 2), False: (4, 4, 4, 3)}
)
"""Outputs of a tile of 1, 2, … rows, where weights are words of bfloat16, and where not. Sums, a
vector of each row, the words and a mask must fit the registers."""
LINE_BYTES: Final = 64
_INT: Final = types.int64


# --- pieces of generated code --------------------------------------------------------------------


def _unit_vectors(code: Code, element: Any, address: Any) -> list[Any]:
    """The two vectors of a unit of weights."""
    builder = code.builder
    if element != I16:
        second = builder.add(address, code.const(code.lanes * bytes_of(element)))
        return [code.load_elements(address, element), code.load_elements(second, element)]
    words = builder.load(builder.inttoptr(address, code.ints.as_pointer()), align=2)
    even = builder.shl(words, code.fill(16))
    odd = builder.and_(words, code.fill(-0x10000))
    return [builder.bitcast(half, code.floats) for half in (even, odd)]


def prefetch(code: Code, address: Any, locality: int = 3) -> None:
    """The line of an address, into the first-level (3) or second-level (2) cache."""
    builder = code.builder
    byte = builder.inttoptr(address, I8.as_pointer())
    code.call("llvm.prefetch.p0i8", ir.VoidType(), byte, I32(0), I32(locality), I32(1))


def sum_lanes(code: Code, totals: list[Any]) -> Any:
    """The sums of up to four vectors side by side: halves are added until four lanes are left, then
    neighbours, of two vectors at a time."""
    builder = code.builder
    undefined = ir.Constant(totals[0].type, ir.Undefined)

    def lanes(a: Any, b: Any, indices: range) -> Any:
        mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
        return builder.shuffle_vector(a, b, mask)

    def fold(total: Any) -> Any:
        num_lanes = code.lanes
        while num_lanes > 4:
            num_lanes //= 2
            unused = ir.Constant(total.type, ir.Undefined)
            low = lanes(total, unused, range(num_lanes))
            total = builder.fadd(low, lanes(total, unused, range(num_lanes, 2 * num_lanes)))
        return total

    def neighbours(a: Any, b: Any) -> Any:
        return builder.fadd(lanes(a, b, range(0, 8, 2)), lanes(a, b, range(1, 8, 2)))

    a, b, c, d = [fold(total) for total in totals] + [fold(undefined)] * (4 - len(totals))
    return neighbours(neighbours(a, b), neighbours(c, d))


def add_to(code: Code, four: Any, num_outputs: int, address: Any) -> None:
    """Adds the first lanes to float32 in memory."""
    builder = code.builder
    if num_outputs == 4:
        code.store(builder.fadd(code.load(address, four.type), four), address)
        return
    for i in range(num_outputs):
        at = builder.add(address, code.const(4 * i))
        code.store(builder.fadd(code.load(at, F32), builder.extract_element(four, I32(i))), at)


class _Operands(NamedTuple):
    """Of a tile, in IR: addresses of x and sums (float32) and of weights (elements), and bytes from
    row to row. As many bytes as the tile's weights have are asked for from `coming` on."""

    x: Any
    x_bytes: Any
    weight: Any
    weight_bytes: Any
    coming: Any
    num_units: Any
    sums: Any
    sums_bytes: Any


def _emit_tile(code: Code, element: Any, rows: int, outputs: int, given: _Operands) -> None:
    """Adds the products of so many rows and outputs to the sums."""
    builder = code.builder
    unit_bytes = UNIT * bytes_of(element)

    def row_at(base: Any, row: int, row_bytes: Any) -> Any:
        return builder.add(base, builder.mul(row_bytes, code.const(row)))

    x_rows = [row_at(given.x, row, given.x_bytes) for row in range(rows)]
    weights = [row_at(given.weight, row, given.weight_bytes) for row in range(outputs)]

    def add(i: Any, totals: list[Any]) -> list[Any]:
        totals = list(totals)
        here = builder.mul(i, code.const(unit_bytes))
        units = [_unit_vectors(code, element, builder.add(at, here)) for at in weights]
        for half in range(2):
            at = builder.add(builder.mul(i, code.const(4 * UNIT)), code.const(half * 2 * UNIT))
            for row, x_row in enumerate(x_rows):
                value = code.load(builder.add(x_row, at))
                for output in range(outputs):
                    j = row * outputs + output
                    totals[j] = code.fma(value, units[output][half], totals[j])
        line = builder.add(given.coming, builder.mul(here, code.const(outputs)))
        for offset in range(0, outputs * unit_bytes, LINE_BYTES):
            prefetch(code, builder.add(line, code.const(offset)))
        return totals

    totals = code.loop(given.num_units, [code.zero] * (rows * outputs), add)
    for row in range(rows):
        four = sum_lanes(code, totals[row * outputs : (row + 1) * outputs])
        add_to(code, four, outputs, row_at(given.sums, row, given.sums_bytes))


@intrinsic
def _tile(
    typing: Any,
    kind: Any,
    num_rows: Any,
    num_outputs: Any,
    x: Any,
    x_bytes: Any,
    weight: Any,
    weight_bytes: Any,
    coming: Any,
    num_units: Any,
    sums: Any,
    sums_bytes: Any,
) -> Any:
    """A tile of `num_rows` and as many outputs as _TILES says, or 1. See _Operands."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, num_rows, num_outputs, *operands = args
        code, element = Code(builder), IR_TYPES[kind.dtype]
        outputs_of, given = _TILES[element == I16], _Operands(*operands)

        def emit_rows(rows: int) -> None:
            is_one = builder.icmp_signed("==", num_outputs, code.const(1))
            with builder.if_else(is_one) as (one, several):
                with one:
                    _emit_tile(code, element, rows, 1, given)
                with several:
                    _emit_tile(code, element, rows, outputs_of[rows - 1], given)

        code.for_each_count(num_rows, len(outputs_of), emit_rows)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 10), generate


@intrinsic
def _unpack_units(typing: Any, kind: Any, source: Any, target: Any, num_units: Any) -> Any:
    """Elements to float32 in the order in which tiles read them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, target, num_units = args
        code, element = Code(builder), IR_TYPES[kind.dtype]

        def copy(i: Any, _: list[Any]) -> list[Any]:
            at = code.at(target, i, 4 * UNIT)
            for vector in _unit_vectors(
                code, element, code.at(source, i, UNIT * bytes_of(element))
            ):
                code.store(vector, at)
                at = builder.add(at, code.const(2 * UNIT))
            return []

        code.loop(num_units, [], copy)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 3), generate


@intrinsic
def _round_vectors(typing: Any, kind: Any, source: Any, target: Any, num_vectors: Any) -> Any:
    """Float32 to elements."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, target, num_vectors = args
        code, element = Code(builder), IR_TYPES[kind.dtype]

        def copy(i: Any, _: list[Any]) -> list[Any]:
            vector = code.load(code.at(source, i, 4 * REGISTER_LANES))
            at = code.at(target, i, REGISTER_LANES * bytes_of(element))
            code.store_elements(vector, at, element)
            return []

        code.loop(num_vectors, [], copy)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 3), generate


@intrinsic
def _most_rows(typing: Any, kind: Any) -> Any:
    """Of a tile."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return I64(len(_TILES[kind.dtype is types.uint16]))

    return types.int64(kind), generate


@intrinsic
def _outputs_of(typing: Any, kind: Any, num_rows: Any) -> Any:
    """Of a tile with this many rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        outputs: Any = I64(1)
        for rows, count in enumerate(_TILES[kind.dtype is types.uint16], 1):
            is_it = builder.icmp_signed("==", args[1], I64(rows))
            outputs = builder.select(is_it, I64(count), outputs)
        return outputs

    return types.int64(kind, types.int64), generate


# --- in compiled functions -----------------------------------------------------------------------


@inlined
def unpack(kind: Any, source: int, count: int, target: int) -> None:
    """One row; zeros fill up the last unit."""
    size = element_bytes(kind)
    whole = count // UNIT
    _unpack_units(kind, source, target, whole)
    if whole * UNIT == count:
        return
    source += whole * UNIT * size
    unit = carray(pointer(target + whole * UNIT * 4), UNIT, np.float32)
    unit[:] = 0.0
    for i in range(count - whole * UNIT):
        # Of bfloat16 the even elements come first.
        place = i // 2 + i % 2 * REGISTER_LANES if kind is BFLOAT16 else i
        unit[place] = load_element(kind, source + i * size)


@inlined
def round_row(kind: Any, source: int, count: int, target: int) -> None:
    size = element_bytes(kind)
    whole = count // REGISTER_LANES
    _round_vectors(kind, source, target, whole)
    for i in range(whole * REGISTER_LANES, count):
        value = carray(pointer(source + i * 4), 1, np.float32)[0]
        store_element(kind, value, target + i * size)


@inlined
def multiply_block(
    kind: Any,
    num_rows: int,
    num_outputs: int,
    x: int,
    x_bytes: int,
    weight: int,
    weight_bytes: int,
    end: int,
    num_units: int,
    sums: int,
) -> None:
    """All tiles of a block. `sums` [rows, BLOCK_OUTPUTS]. Behind `end` nothing is asked for: to
    find no page there takes a processor longer than a tile."""
    row = 0
    while row < num_rows:
        rows = min(_most_rows(kind), num_rows - row)
        output = 0
        while output < num_outputs:
            outputs = _outputs_of(kind, rows)
            if output + outputs > num_outputs:
                outputs = 1
            here = weight + output * weight_bytes
            coming = here + outputs * weight_bytes
            if coming + outputs * weight_bytes > end:
                coming = here
            _tile(
                kind,
                rows,
                outputs,
                x + row * x_bytes,
                x_bytes,
                here,
                weight_bytes,
                coming,
                num_units,
                sums + (row * BLOCK_OUTPUTS + output) * 4,
                BLOCK_OUTPUTS * 4,
            )
            output += outputs
        row += rows
