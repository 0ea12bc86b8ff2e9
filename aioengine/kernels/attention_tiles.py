"""What attention computes between two looks at the block table, in LLVM IR: products of a few
query rows with keys, softmax weights, products of those with values, sums of such results.

Shapes: M ≤ ROWS query rows of one kv head · H head_dim · D = H, or H / 2 pairs.

**Items** are what one lane multiplies at a time: a number, as float32, or, where the processor has
dot products of bfloat16, a pair of them (PAIR): of features that follow each other in keys, of
slots that follow each other in values. Queries and weights lie in scratch as items, 4 bytes each;
in the cache an item has as many bytes as its type. Sums are float32.

**Units** are VECTOR slots of a block. Units come as a list of addresses: of keys [D, block_size],
from the unit's first slot on, and of values, [VECTOR, H] numbers or [VECTOR / 2, H] pairs. Both
products take turns at the units, as many as they can, one item of each: a processor reads several
streams of memory at twice the rate of one, wherever the blocks lie, and needs no prefetching.

**Order of sums.** Every result is summed by itself, feature by feature, or first slots of all units
by second ones. So it does not depend on which rows are computed with it.

**A line** is what a query row has come to over some keys: H sums of weighted values, then, from
`stats` on, the largest score in units of log 2, and the sum of weights 2^(score - largest). A line
of no keys is zeros, minus infinity and zero.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    F32,
    I1,
    I16,
    I32,
    I64,
    IR_TYPES,
    NUM_REGISTERS,
    REGISTER_LANES,
    Code,
    bytes_of,
    for_each,
)

VECTOR: Final = 16
"""Slots of a unit: one register of AVX-512, two of AVX2, four of NEON."""
_WIDE: Final = 2 if (REGISTER_LANES, NUM_REGISTERS) == (8, 16) else 4
"""Registers of results, at least, in each row of a tile with as many rows as there can be."""
FEATURES: Final = _WIDE * REGISTER_LANES
ROWS: Final = (NUM_REGISTERS - _WIDE - 1) // _WIDE
"""Query rows of a tile. One register is left for what is spread."""
STEP_UNITS: Final = 16
"""In a list. A tile of one row takes them all at a time."""
_FULL_MASK: Final = ir.Constant(I16, -1)
_CURRENT_ROUNDING: Final = I32(4)
_LOWER_HALF: Final = 0xFFFF
_INT: Final = types.int64


# --- items ---------------------------------------------------------------------------------------


class _Items:
    """What tiles do with items of one type."""

    def __init__(self, code: Code, kind: Any, only_firsts: bool = False) -> None:
        self._only_firsts = only_firsts
        self._code = code
        self._element = IR_TYPES[kind.dtype]
        self.is_pair = self._element == I32
        self.num_bytes = bytes_of(self._element)

    def load(self, address: Any) -> Any:
        """Adjacent ones, from the cache."""
        if self.is_pair:
            pairs = self._code.load(address, self._code.ints)
            if self._only_firsts:
                pairs = self._code.builder.and_(pairs, self._code.fill(_LOWER_HALF))
            return pairs
        return self._code.load_elements(address, self._element)

    def spread(self, address: Any) -> Any:
        """One of the scratch, to all lanes."""
        item = self._code.splat(self._code.load(address, F32))
        return self._code.builder.bitcast(item, self._code.ints) if self.is_pair else item

    def add_product(self, a: Any, b: Any, total: Any) -> Any:
        if not self.is_pair:
            return self._code.fma(a, b, total)
        return self._code.call("llvm.x86.avx512bf16.dpbf16ps.512", self._code.floats, total, a, b)


# --- products ------------------------------------------------------------------------------------


def _row_addresses(code: Code, base: Any, row_bytes: Any, num_rows: int) -> list[Any]:
    return [
        code.builder.add(base, code.builder.mul(code.const(m), row_bytes)) for m in range(num_rows)
    ]


def _add_row_products(
    items: _Items, code: Code, rows: list[Any], index: Any, places: list[Any], sums: list[Any]
) -> list[Any]:
    """`sums` [M, registers] plus each row's item `index` times the items at the places."""
    sums = list(sums)
    num_registers = len(places)

    def add(m: int, n: int, item: Any, value: Any) -> None:
        i = m * num_registers + n
        sums[i] = items.add_product(item, value, sums[i])

    if len(rows) < num_registers:  # the fewer ones stay in registers, the others come one by one
        spread = [items.spread(code.at(row, index, 4)) for row in rows]
        for n, place in enumerate(places):
            value = items.load(place)
            for m, item in enumerate(spread):
                add(m, n, item, value)
        return sums
    loaded = [items.load(place) for place in places]
    for m, row in enumerate(rows):
        item = items.spread(code.at(row, index, 4))
        for n, value in enumerate(loaded):
            add(m, n, item, value)
    return sums


def _score_registers(num_rows: int) -> int:
    """Of results, in each row of a tile."""
    registers = _WIDE
    while 2 * registers * num_rows <= _WIDE * ROWS and registers < STEP_UNITS:
        registers *= 2
    return registers


class _Score(NamedTuple):
    """Operands of `score`, in IR."""

    queries: Any
    depth: Any
    units: Any
    row_bytes: Any
    count: Any
    scores: Any
    scores_bytes: Any


def _emit_score(code: Code, kind: Any, num_rows: int, given: _Score) -> None:
    builder, items = code.builder, _Items(code, kind)
    registers = _score_registers(num_rows)
    columns = registers * REGISTER_LANES
    query_bytes = builder.mul(given.depth, code.const(4))
    rows = _row_addresses(code, given.queries, query_bytes, num_rows)
    outs = _row_addresses(code, given.scores, given.scores_bytes, num_rows)

    def score_tile(tile: Any, _: list[Any]) -> list[Any]:
        column = builder.mul(tile, code.const(columns))

        def keys_at(register: int) -> Any:
            slot = builder.add(column, code.const(register * REGISTER_LANES))
            unit = builder.udiv(slot, code.const(VECTOR))
            lane = register * REGISTER_LANES % VECTOR
            base = code.load(code.at(given.units, unit, 8), I64)
            return builder.add(base, code.const(lane * items.num_bytes))

        keys = [keys_at(register) for register in range(registers)]

        def add(i: Any, sums: list[Any]) -> list[Any]:
            here = builder.mul(i, given.row_bytes)
            places = [builder.add(key, here) for key in keys]
            return _add_row_products(items, code, rows, i, places, sums)

        zeros = [code.zero] * (num_rows * registers)
        for i, total in enumerate(code.loop(given.depth, zeros, add, is_unrolled=False)):
            m, register = divmod(i, registers)
            there = builder.add(column, code.const(register * REGISTER_LANES))
            code.store(total, code.at(outs[m], there, 4))
        return []

    in_tiles = builder.add(given.count, code.const(columns - 1))
    num_tiles = builder.udiv(in_tiles, code.const(columns))
    code.loop(num_tiles, [], score_tile, is_unrolled=False)


@intrinsic
def score(
    typing: Any,
    kind: Any,
    num_rows: Any,
    queries: Any,
    depth: Any,
    units: Any,
    row_bytes: Any,
    count: Any,
    scores: Any,
    scores_bytes: Any,
) -> Any:
    """Scores of `count` slots, and some more, for the rows.

    Addresses: `queries` items [M, D], `units` int64 [STEP_UNITS], of keys with `row_bytes` from
    feature to feature; `scores` float32, `scores_bytes` a row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, given = Code(builder), _Score(*args[2:])
        code.for_each_count(args[1], ROWS, lambda num: _emit_score(code, kind, num, given))
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 8), generate


class _Values(NamedTuple):
    """Operands of `sum_values`, in IR."""

    weights: Any
    weights_bytes: Any
    units: Any
    offset: Any
    row_bytes: Any
    count: Any
    lines: Any
    line_bytes: Any


def _emit_values(code: Code, kind: Any, num_rows: int, num_registers: int, given: _Values) -> None:
    builder, items = code.builder, _Items(code, kind)
    slots_of_item = 2 if items.is_pair else 1
    in_unit = code.const(VECTOR // slots_of_item)
    num_items = builder.udiv(given.count, code.const(slots_of_item))
    num_whole, num_left = builder.udiv(num_items, in_unit), builder.urem(num_items, in_unit)
    rows = _row_addresses(code, given.weights, given.weights_bytes, num_rows)

    def places_of(unit: Any, i: Any) -> list[Any]:
        """The i-th items of a unit."""
        base = builder.add(code.load(code.at(given.units, unit, 8), I64), given.offset)
        row = builder.add(base, builder.mul(i, given.row_bytes))
        vector_bytes = REGISTER_LANES * items.num_bytes
        return [
            builder.add(row, code.const(register * vector_bytes))
            for register in range(num_registers)
        ]

    def add_items(i: Any, sums: list[Any]) -> list[Any]:
        def add_item(unit: Any, sums: list[Any]) -> list[Any]:
            index = builder.add(builder.mul(unit, in_unit), i)
            return _add_row_products(items, code, rows, index, places_of(unit, i), sums)

        is_left = builder.icmp_signed("<", i, num_left)
        num_units = builder.add(num_whole, builder.zext(is_left, I64))
        return code.loop(num_units, sums, add_item, is_unrolled=False)

    def add_odd_slot() -> list[Any]:
        """The last slot; what is second in its pair is behind `count`."""
        firsts, places = _Items(code, kind, only_firsts=True), places_of(num_whole, num_left)
        return _add_row_products(firsts, code, rows, num_items, places, sums)

    zeros = [code.zero] * (num_rows * num_registers)
    sums = code.loop(in_unit, zeros, add_items, is_unrolled=False)
    if items.is_pair:
        sums = code.when(builder.trunc(given.count, I1), sums, add_odd_slot)
    lines = _row_addresses(code, given.lines, given.line_bytes, num_rows)
    for i, total in enumerate(sums):
        m, register = divmod(i, num_registers)
        code.store(total, builder.add(lines[m], code.const(register * REGISTER_LANES * 4)))


def _sum_values(num_registers: int) -> Any:
    @intrinsic
    def sum_values(
        typing: Any,
        kind: Any,
        num_rows: Any,
        weights: Any,
        weights_bytes: Any,
        units: Any,
        offset: Any,
        row_bytes: Any,
        count: Any,
        lines: Any,
        line_bytes: Any,
    ) -> Any:
        """Stores the first `count` slots' values, weighted and summed, to `num_registers` vectors
        of the lines.

        Addresses: `weights` items [M, slots], `weights_bytes` a row; `units` int64, of values
        `offset` bytes further on, with `row_bytes` from item to item; `lines` float32. No other
        slots are read.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code, given = Code(builder), _Values(*args[2:])
            code.for_each_count(
                args[1], ROWS, lambda num: _emit_values(code, kind, num, num_registers, given)
            )
            return context.get_dummy_value()

        return types.void(kind, *[_INT] * 9), generate

    return sum_values


sum_values_wide: Final = _sum_values(_WIDE)
"""Of FEATURES features."""
sum_values_one: Final = _sum_values(1)


# --- softmax -------------------------------------------------------------------------------------


def _short_exp2(code: Code, x: Any) -> Any:
    """2^x, to 8e-5 of it, by instructions of AVX-512: 50 times better than bfloat16 holds it."""
    floor = I32(9)
    part = code.call(
        "llvm.x86.avx512.mask.reduce.ps.512",
        code.floats,
        *(x, floor, code.zero, _FULL_MASK, _CURRENT_ROUNDING),
    )
    power = code.fill(_SHORT_EXP2[-1])
    for coefficient in reversed(_SHORT_EXP2[:-1]):
        power = code.fma(power, part, code.fill(coefficient))
    return code.call(
        "llvm.x86.avx512.mask.scalef.ps.512",
        code.floats,
        *(power, x, code.zero, _FULL_MASK, _CURRENT_ROUNDING),
    )


_SHORT_EXP2: Final = (0.99992522, 0.69583353, 0.22606717, 0.07802452)
"""Of 2^x in [0, 1), with the least relative error."""
_PAIR_OF_ONES: Final = 0x3F803F80


def _weights_of(code: Code, items: _Items, power: Callable[[Any], Any], i: Any, total: Any) -> Any:
    """Items of weights for the i-th items, and the sum of weights after them."""
    if not items.is_pair:
        weights = power(i)
        return weights, code.builder.fadd(total, weights)
    first = code.builder.mul(i, code.const(2))
    low, high = power(first), power(code.builder.add(first, code.const(1)))
    halves = ir.VectorType(I16, 2 * code.lanes)
    packed = code.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", halves, high, low)
    weights = code.builder.bitcast(packed, code.ints)
    return weights, items.add_product(weights, code.fill(_PAIR_OF_ONES), total)


@intrinsic
def weigh(typing: Any, kind: Any, scores: Any, num_vectors: Any, scale: Any, stats: Any) -> Any:
    """A row's scores become weights, items, in their place; its statistics are stored.

    Addresses of float32: `scores`, to be scaled to units of log 2, [num_vectors × items' numbers ×
    lanes], and `stats`. The sum is of weights as they are stored.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, scores, num_vectors, scale, stats = args
        code = Code(builder)
        items = _Items(code, kind)
        factor = code.splat(scale)
        vector_bytes = 4 * REGISTER_LANES

        def load(i: Any) -> Any:
            return code.load(code.at(scores, i, vector_bytes))

        def larger(i: Any, sums: list[Any]) -> list[Any]:
            return [code.larger(load(i), sums[0])]

        num_scores = builder.mul(num_vectors, code.const(2 if items.is_pair else 1))
        (largest,) = code.loop(num_scores, [code.fill(float("-inf"))], larger)
        top = builder.fmul(code.max_lanes(largest), scale)
        minus_top = code.splat(builder.fneg(top))

        def power(i: Any) -> Any:
            exponent = code.fma(load(i), factor, minus_top)
            return _short_exp2(code, exponent) if items.is_pair else code.exp2(exponent)

        def weights(i: Any, sums: list[Any]) -> list[Any]:
            stored, total = _weights_of(code, items, power, i, sums[0])
            code.store(stored, code.at(scores, i, vector_bytes))
            return [total]

        (total,) = code.loop(num_vectors, [code.zero], weights)
        code.store(top, stats)
        code.store(code.sum_lanes(total), builder.add(stats, code.const(4)))
        return context.get_dummy_value()

    return types.void(kind, _INT, _INT, types.float32, _INT), generate


@intrinsic
def fold(typing: Any, line: Any, other: Any, stats: Any, num_vectors: Any) -> Any:
    """Adds another line to a line; at least one of them has keys. `stats`: bytes from the begin of
    a line on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line, other, stats, num_vectors = args
        code = Code(builder)
        line_stats, other_stats = builder.add(line, stats), builder.add(other, stats)
        tops = [code.splat(code.load(at, F32)) for at in (line_stats, other_stats)]
        top = code.max(*tops)
        ours, theirs = (code.exp2(builder.fsub(one, top)) for one in tops)

        def add(i: Any, sums: list[Any]) -> list[Any]:
            place = code.at(line, i, 4 * REGISTER_LANES)
            added = builder.fmul(code.load(code.at(other, i, 4 * REGISTER_LANES)), theirs)
            code.store(code.fma(code.load(place), ours, added), place)
            return []

        code.loop(num_vectors, [], add)
        # The statistics lie in the line's last vector, of which nothing else is used.
        total_at = builder.add(line_stats, code.const(4))
        total = code.load(builder.add(other_stats, code.const(4)), F32)
        added = builder.fmul(code.splat(total), theirs)
        total = code.fma(code.splat(code.load(total_at, F32)), ours, added)
        code.store(builder.extract_element(total, I32(0)), total_at)
        code.store(builder.extract_element(top, I32(0)), line_stats)
        return context.get_dummy_value()

    return types.void(*[_INT] * 4), generate


# --- in and out ----------------------------------------------------------------------------------


@intrinsic
def load_items(typing: Any, kind: Any, source: Any, count: Any, target: Any) -> Any:
    """Queries to items."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, count, target = args
        element = IR_TYPES[kind.dtype]

        def copy(code: Code, i: Any) -> None:
            at = code.at(source, i, bytes_of(element))
            if element == I32:
                code.store(code.load(at, code.ints), code.at(target, i, 4))
            else:
                code.store(code.load_elements(at, element), code.at(target, i, 4))

        for_each(builder, count, copy)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 3), generate


@intrinsic
def store_scaled(typing: Any, kind: Any, source: Any, count: Any, factor: Any, target: Any) -> Any:
    """`count` float32, times a factor, as numbers of the items' type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, count, factor, target = args
        element = IR_TYPES[kind.dtype]
        number = I16 if element == I32 else element

        def copy(code: Code, i: Any) -> None:
            values = builder.fmul(code.load(code.at(source, i, 4)), code.splat(factor))
            code.store_elements(values, code.at(target, i, bytes_of(number)), number)

        for_each(builder, count, copy)
        return context.get_dummy_value()

    return types.void(kind, _INT, _INT, types.float32, _INT), generate
