"""Products y = x · Wᵀ + bias over weights as they lie: [O, I] in bfloat16, float16 or float32.

Shapes: T rows of x · I input features · O output features.

**A chunk** is a block of outputs of a block of rows. It goes through them in tiles of a few rows and
a few outputs, whose sums are vectors that stay in registers while the loop runs over I, and become
numbers by one addition of lanes. Tiles read weights in one of two forms, with the same results:

- as they lie, widened on the way. For few rows: the memory's speed is the limit, and the rows after
  the first find the block in cache. Each tile asks for the next one's weights in the order of their
  addresses, because processors foresee a stream and not several short ones.
- unpacked to float32, the chunk's block at once. For many rows, which share that work.

**Units.** The loop's step is a unit of two vectors. Of bfloat16 it is a vector of words with two
elements each: shifted up, a word is the even one, and without its lower half the odd one. So x, as
float32, has the even elements of a unit before its odd ones, and zeros behind the last.

**Order of sums.** It follows from the type and from I alone. So a row's results are the same to the
last bit whatever other rows there are, however many threads, and in either form.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    BFLOAT16,
    F32,
    FLOAT16,
    FLOAT32,
    I8,
    I16,
    I32,
    IR_TYPES,
    NUM_REGISTERS,
    REGISTER_LANES,
    Code,
    bytes_of,
    element_bytes,
    entry,
    inlined,
    kernel,
    load_element,
    pointer,
    store_element,
)
from aioengine.kernels.team import Team

UNIT: Final = 2 * REGISTER_LANES
BLOCK_OUTPUTS: Final = 48
"""A multiple of every tile's."""
BLOCK_ROWS: Final = 256
MAX_BLOCK_INPUTS: Final = 1024
"""A tile's rows and outputs over this many inputs fit the first-level cache."""
UNPACKED_ROWS: Final = 16
"""From here on weights are unpacked."""
ROWS_PER_CHUNK: Final = 16
"""When many rows of x are brought into the form that tiles read."""

_TILES: Final = (
    {True: (4, 4, 4, 4), False: (4, 4, 4, 4, 4, 4)}
    if NUM_REGISTERS >= 32
    else {True: (4, 4, 3, 2), False: (4, 4, 4, 3)}
)
"""Outputs of a tile of 1, 2, … rows, where weights are words of bfloat16, and where not. Sums, a
vector of each row, the words and a mask must fit the registers."""
_WORD_OUTPUTS: Final = _TILES[True]
_PLAIN_OUTPUTS: Final = _TILES[False]

_JOB: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x",  # float32 [T, x_bytes]
            "x_bytes",
            "weight",
            "bias",  # 0 without
            "out",
            "out_bytes",  # of a row
            "out_is_float32",  # else of the weight's type
            "num_rows",
            "num_inputs",
            "num_outputs",
            "block_inputs",
            "unpacks",
            "scratch",  # [threads, _SCRATCH_BYTES]
            "raw_x",  # what `x` is made from, [T, raw_x_bytes]
            "raw_x_bytes",
        )
    ]
)
_SUMS_BYTES: Final = BLOCK_ROWS * BLOCK_OUTPUTS * 4
_SCRATCH_BYTES: Final = _SUMS_BYTES + BLOCK_OUTPUTS * MAX_BLOCK_INPUTS * 4
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


def _prefetch(code: Code, address: Any) -> None:
    builder = code.builder
    byte = builder.inttoptr(address, I8.as_pointer())
    code.call("llvm.prefetch.p0i8", ir.VoidType(), byte, I32(0), I32(3), I32(1))


def _sum_lanes(code: Code, totals: list[Any]) -> Any:
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


def _add_to(code: Code, four: Any, num_outputs: int, address: Any) -> None:
    """Adds the first lanes to float32 in memory."""
    builder = code.builder
    if num_outputs == 4:
        code.store(builder.fadd(code.load(address, four.type), four), address)
        return
    for i in range(num_outputs):
        at = builder.add(address, code.const(4 * i))
        code.store(builder.fadd(code.load(at, F32), builder.extract_element(four, I32(i))), at)


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
    """Adds products to `sums`. `num_outputs` is what _TILES says for these rows, or 1.

    Addresses: `x` and `sums` float32, `weight` elements; `*_bytes` from row to row. As many bytes
    as the tile's weights have are asked for from `coming` on.
    """
    element = IR_TYPES[kind.dtype]
    outputs_of = _TILES[element == I16]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, num_rows, num_outputs, x, x_bytes, weight, weight_bytes, coming, num_units, *rest = args
        sums, sums_bytes = rest
        code = Code(builder)
        unit_bytes = UNIT * bytes_of(element)

        def emit(rows: int, outputs: int) -> None:
            def row_at(base: Any, row: int, row_bytes: Any) -> Any:
                return builder.add(base, builder.mul(row_bytes, code.const(row)))

            x_rows = [row_at(x, row, x_bytes) for row in range(rows)]
            weights = [row_at(weight, output, weight_bytes) for output in range(outputs)]

            def add(i: Any, totals: list[Any]) -> list[Any]:
                totals = list(totals)
                here = builder.mul(i, code.const(unit_bytes))
                units = [_unit_vectors(code, element, builder.add(at, here)) for at in weights]
                for half in range(2):
                    at = builder.add(
                        builder.mul(i, code.const(4 * UNIT)), code.const(half * 2 * UNIT)
                    )
                    for row, x_row in enumerate(x_rows):
                        value = code.load(builder.add(x_row, at))
                        for output in range(outputs):
                            j = row * outputs + output
                            totals[j] = code.fma(value, units[output][half], totals[j])
                line = builder.add(coming, builder.mul(here, code.const(outputs)))
                for offset in range(0, outputs * unit_bytes, 64):
                    _prefetch(code, builder.add(line, code.const(offset)))
                return totals

            totals = code.loop(num_units, [code.zero] * (rows * outputs), add)
            for row in range(rows):
                at = row_at(sums, row, sums_bytes)
                _add_to(
                    code, _sum_lanes(code, totals[row * outputs : (row + 1) * outputs]), outputs, at
                )

        def emit_rows(rows: int) -> None:
            is_one = builder.icmp_signed("==", num_outputs, code.const(1))
            with builder.if_else(is_one) as (one, several):
                with one:
                    emit(rows, 1)
                with several:
                    emit(rows, outputs_of[rows - 1])

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


# --- kernels -------------------------------------------------------------------------------------


@inlined
def _unpack(kind: Any, source: int, count: int, target: int) -> None:
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
def _round(kind: Any, source: int, count: int, target: int) -> None:
    size = element_bytes(kind)
    whole = count // REGISTER_LANES
    _round_vectors(kind, source, target, whole)
    for i in range(whole * REGISTER_LANES, count):
        value = carray(pointer(source + i * 4), 1, np.float32)[0]
        store_element(kind, value, target + i * size)


@inlined
def _tiles(
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
    tiles = _WORD_OUTPUTS if kind is BFLOAT16 else _PLAIN_OUTPUTS
    row = 0
    while row < num_rows:
        rows = min(len(tiles), num_rows - row)
        output = 0
        while output < num_outputs:
            outputs = tiles[rows - 1]
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
def _product(kind: Any, args: int, chunk: int, thread: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    size = element_bytes(kind)
    row_block, output_block = divmod(chunk, _blocks(job.num_outputs, BLOCK_OUTPUTS))
    row, output = row_block * BLOCK_ROWS, output_block * BLOCK_OUTPUTS
    num_rows = min(BLOCK_ROWS, job.num_rows - row)
    num_outputs = min(BLOCK_OUTPUTS, job.num_outputs - output)
    weight_bytes = job.num_inputs * size
    sums = job.scratch + thread * _SCRATCH_BYTES
    unpacked = sums + _SUMS_BYTES
    bias = job.bias + output * size if job.bias else 0
    _start_sums(kind, bias, num_rows, num_outputs, sums)
    for first in range(0, job.num_inputs, job.block_inputs):
        count = min(job.block_inputs, job.num_inputs - first)
        units = _blocks(count, UNIT)
        x = job.x + row * job.x_bytes + first * 4
        weight = job.weight + output * weight_bytes + first * size
        if job.unpacks:
            unpacked_bytes = units * UNIT * 4
            end = unpacked + num_outputs * unpacked_bytes
            for i in range(num_outputs):
                _unpack(kind, weight + i * weight_bytes, count, unpacked + i * unpacked_bytes)
            _tiles(
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
            _tiles(
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
    for i in range(num_rows):
        source = sums + i * BLOCK_OUTPUTS * 4
        out = job.out + (row + i) * job.out_bytes
        if job.out_is_float32:
            _round(FLOAT32, source, num_outputs, out + output * 4)
        else:
            _round(kind, source, num_outputs, out + output * size)


@inlined
def _blocks(count: int, size: int) -> int:
    return (count + size - 1) // size


@inlined
def _unpack_rows(kind: Any, args: int, chunk: int) -> None:
    """ROWS_PER_CHUNK rows of x."""
    job = carray(pointer(args), 1, _JOB)[0]
    for row in range(chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, job.num_rows)):
        source = job.raw_x + row * job.raw_x_bytes
        _unpack(kind, source, job.num_inputs, job.x + row * job.x_bytes)


@kernel
def _multiply_float32(args: int, chunk: int, thread: int) -> None:
    _product(FLOAT32, args, chunk, thread)


@kernel
def _multiply_bfloat16(args: int, chunk: int, thread: int) -> None:
    _product(BFLOAT16, args, chunk, thread)


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


_KERNELS: Final = {
    FLOAT32: (_unpack_float32, _multiply_float32),
    BFLOAT16: (_unpack_bfloat16, _multiply_bfloat16),
    FLOAT16: (_unpack_float16, _multiply_float16),
}


@entry
def _begin(
    kind: Any,
    args: int,
    raw_x: int,
    raw_x_bytes: int,
    weight: int,
    bias: int,
    out: int,
    out_is_float32: bool,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    """Fills the record; `x` and `scratch` are there."""
    job = carray(pointer(args), 1, _JOB)[0]
    job.raw_x = raw_x
    job.raw_x_bytes = raw_x_bytes
    job.x_bytes = _blocks(num_inputs, UNIT) * UNIT * 4
    job.weight = weight
    job.bias = bias
    job.out = out
    job.out_is_float32 = out_is_float32
    job.out_bytes = num_outputs * (4 if out_is_float32 else element_bytes(kind))
    job.num_rows = num_rows
    job.num_inputs = num_inputs
    job.num_outputs = num_outputs
    blocks = _blocks(num_inputs, MAX_BLOCK_INPUTS)
    job.block_inputs = _blocks(_blocks(num_inputs, blocks), UNIT) * UNIT
    has_whole_units = num_inputs % UNIT == 0
    job.unpacks = not has_whole_units or (num_rows >= UNPACKED_ROWS and kind is not FLOAT32)
    if num_rows <= ROWS_PER_CHUNK:
        _unpack_rows(kind, args, 0)


class Linear:
    """Products on a team's threads, with the memory they need. One product at a time."""

    def __init__(self, team: Team, kind: type) -> None:
        self._team = team
        self._kind = kind
        self._unpack, self._multiply = (kernel.address for kernel in _KERNELS[kind])
        self._job = np.zeros(1, _JOB)
        self._args = self._job.ctypes.data
        self._scratch, self._job["scratch"] = _aligned(team.num_threads * _SCRATCH_BYTES)
        self._x_bytes = 0

    def __call__(
        self,
        x: int,
        x_bytes: int,
        weight: int,
        bias: int,
        out: int,
        out_is_float32: bool,
        num_rows: int,
        num_inputs: int,
        num_outputs: int,
    ) -> None:
        """Addresses of x [T, I] with rows `x_bytes` apart, the weight [O, I], the bias [O] or 0, and
        the result [T, O]. All of this product's type, but for a float32 result where asked for."""
        needed = num_rows * (num_inputs + UNIT) * 4
        if needed > self._x_bytes:
            self._x, self._job["x"] = _aligned(needed)
            self._x_bytes = needed
        _begin(
            self._kind,
            self._args,
            x,
            x_bytes,
            weight,
            bias,
            out,
            out_is_float32,
            num_rows,
            num_inputs,
            num_outputs,
        )
        if num_rows > ROWS_PER_CHUNK:
            self._team.run(self._unpack, self._args, -(-num_rows // ROWS_PER_CHUNK))
        num_chunks = -(-num_rows // BLOCK_ROWS) * -(-num_outputs // BLOCK_OUTPUTS)
        self._team.run(self._multiply, self._args, num_chunks)


def _aligned(num_bytes: int) -> tuple[Any, int]:
    """Memory that begins with a cache line, and its address."""
    memory = np.empty(num_bytes + 64, np.uint8)
    return memory, memory.ctypes.data + -memory.ctypes.data % 64
