"""Compiled attention over the paged cache of a CPU, in place. Needs numba.

Shapes: R rows · K kv heads · G query heads of a kv head · H head_dim · L cached tokens.

Keys lie as [block, K, H, slot] and values as [block, K, slot, H], so that the inner loops of both
products run over adjacent elements: scores of 16 slots at a time, outputs of 16 features at a time.
Both are written in LLVM IR, because vectors of fixed width, and conversions of half types inside of
them, are not numba's. Vectors are of float32 whatever the type of the cache; LLVM lowers them to
what the processor has.

A row's scores stay in float32 scratch between the two products. Slots behind its last token are
read for scores and then overwritten by minus infinity, and are not read for values: what another
request left there (NaN, even) cannot reach it. Where H is no multiple of 16 the last vector of
values reads into the next slot, and behind the tensor after the last one, which must have room for
it; those lanes are dropped.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

VECTOR: Final = 16
"""Elements worked on at a time: one register of AVX-512, two of AVX2, four of NEON."""
MAX_HEADS: Final = 4
"""Query heads of a kv head that share a pass over its keys or values."""
_WIDE: Final = 4
"""Vectors of features that share a pass over the values."""
LOG2_E: Final = 1.4426950408889634

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_F32_V, _I32_V = ir.VectorType(_F32, VECTOR), ir.VectorType(_I32, VECTOR)
_ELEMENTS: Final = {types.int16: _I16, types.int8: ir.HalfType(), types.float32: _F32}
"""In memory, by the type of the (empty) array that stands for it: `carrier` in what follows. int16
stands for bfloat16, int8 for float16."""


# --- pieces of generated code ------------------------------------------------------------------


class _Code:
    """A builder, and what the kernels say with it. Addresses are int64."""

    def __init__(self, builder: ir.IRBuilder, kind: types.Type) -> None:
        self.builder = builder
        self._element = _ELEMENTS[kind]
        self.element_bytes = 4 if self._element is _F32 else 2

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    def at(self, base: Any, index: Any, num_bytes: int) -> Any:
        """The address of an element."""
        return self.builder.add(base, self.builder.mul(index, self.const(num_bytes)))

    def load_elements(self, address: Any) -> Any:
        """VECTOR elements of the cache's type, as float32."""
        vector = ir.VectorType(self._element, VECTOR)
        pointer = self.builder.inttoptr(address, vector.as_pointer())
        loaded = self.builder.load(pointer, align=self.element_bytes)
        if self._element is _F32:
            return loaded
        if self._element is not _I16:
            return self.builder.fpext(loaded, _F32_V)
        sixteen = ir.Constant(_I32_V, [16] * VECTOR)
        return self.builder.bitcast(
            self.builder.shl(self.builder.zext(loaded, _I32_V), sixteen), _F32_V
        )

    def load(self, address: Any, kind: Any = _F32_V) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(_F32_V, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(_I32_V, [0] * VECTOR))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(_F32_V, [_F32_V] * 3)
        name = f"llvm.fma.v{VECTOR}f32"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])

    def loop(self, count: Any, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> Any:
        """`sums = body(i, sums)` for i in range(count), in registers; the final sums."""
        builder = self.builder
        before = builder.block
        head = builder.append_basic_block("head")
        inside = builder.append_basic_block("inside")
        after = builder.append_basic_block("after")
        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(_I64)
        i.add_incoming(self.const(0), before)
        phis = [builder.phi(_F32_V) for _ in sums]
        for phi, start in zip(phis, sums, strict=True):
            phi.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", i, count), inside, after)
        builder.position_at_end(inside)
        for phi, value in zip(phis, body(i, phis), strict=True):
            phi.add_incoming(value, builder.block)
        i.add_incoming(builder.add(i, self.const(1)), builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return phis


_ZERO: Final = ir.Constant(_F32_V, [0.0] * VECTOR)
_INT: Final = types.int64


def _for_each_count(builder: Any, count: Any, emit: Callable[[int], None]) -> None:
    """`emit(n)` for the n, 1 to MAX_HEADS, that `count` is at run time."""
    done = builder.append_basic_block("done")
    switch = builder.switch(count, done)
    for n in range(1, MAX_HEADS + 1):
        block = builder.append_basic_block(f"count_{n}")
        switch.add_case(ir.Constant(_I64, n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def _score(
    typing: Any,
    carrier: Any,
    num_heads: Any,
    q: Any,
    keys: Any,
    stride: Any,
    head_dim: Any,
    scores: Any,
    scores_stride: Any,
) -> Any:
    """Scores of VECTOR slots for `num_heads` query heads. Addresses: `q` float32 [heads, H],
    `keys` elements [H, ·] with `stride` elements a row, `scores` float32 with `scores_stride`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, num_heads, q, keys, stride, head_dim, scores, scores_stride = args
        code = _Code(builder, carrier.dtype)
        row_bytes = builder.mul(stride, code.const(code.element_bytes))

        def add(i: Any, sums: list[Any]) -> list[Any]:
            key = code.load_elements(builder.add(keys, builder.mul(i, row_bytes)))
            products = []
            for head, total in enumerate(sums):
                index = builder.add(i, builder.mul(code.const(head), head_dim))
                query = code.splat(code.load(code.at(q, index, 4), _F32))
                products.append(code.fma(query, key, total))
            return products

        def emit(n: int) -> None:
            for head, total in enumerate(code.loop(head_dim, [_ZERO] * n, add)):
                code.store(total, code.at(scores, builder.mul(code.const(head), scores_stride), 4))

        _for_each_count(builder, num_heads, emit)
        return context.get_dummy_value()

    return types.void(carrier, *[_INT] * 7), generate


def _accumulate(num_vectors: int) -> Any:
    @intrinsic
    def accumulate(
        typing: Any,
        carrier: Any,
        num_heads: Any,
        weights: Any,
        weights_stride: Any,
        values: Any,
        stride: Any,
        count: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        """Adds `count` slots' values, weighted, to `num_vectors` × VECTOR features of `num_heads`
        outputs. Addresses: `weights` and `out` float32, `values` elements with `stride` a slot."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, num_heads, weights, weights_stride, values, stride, count, out, out_stride = args
            code = _Code(builder, carrier.dtype)
            row_bytes = builder.mul(stride, code.const(code.element_bytes))
            vector_bytes = VECTOR * code.element_bytes

            def out_at(head: int, vector: int) -> Any:
                index = builder.mul(code.const(head), out_stride)
                return code.at(out, builder.add(index, code.const(vector * VECTOR)), 4)

            def add(i: Any, sums: list[Any]) -> list[Any]:
                row = builder.add(values, builder.mul(i, row_bytes))
                loaded = [
                    code.load_elements(builder.add(row, code.const(vector * vector_bytes)))
                    for vector in range(num_vectors)
                ]
                products = []
                for head in range(len(sums) // num_vectors):
                    index = builder.add(i, builder.mul(code.const(head), weights_stride))
                    weight = code.splat(code.load(code.at(weights, index, 4), _F32))
                    totals = sums[head * num_vectors : (head + 1) * num_vectors]
                    products += [
                        code.fma(weight, value, total)
                        for value, total in zip(loaded, totals, strict=True)
                    ]
                return products

            def emit(n: int) -> None:
                places = [
                    out_at(head, vector) for head in range(n) for vector in range(num_vectors)
                ]
                sums = code.loop(count, [code.load(place) for place in places], add)
                for place, total in zip(places, sums, strict=True):
                    code.store(total, place)

            _for_each_count(builder, num_heads, emit)
            return context.get_dummy_value()

        return types.void(carrier, *[_INT] * 8), generate

    return accumulate


_accumulate_wide: Final = _accumulate(_WIDE)
_accumulate_one: Final = _accumulate(1)


_EXP2: Final = (1.0, 0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530)
"""Taylor series of 2^x, right to 1.2e-7 for |x| ≤ 0.5."""


@intrinsic
def _softmax(typing: Any, scores: Any, num_vectors: Any) -> Any:
    """Scores, in units of log 2, become weights 2^(score - largest); their sum is returned.

    Addresses of float32; at least one score is finite.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, num_vectors = args
        code = _Code(builder, types.float32)

        def call(name: str, kind: Any, *operands: Any) -> Any:
            function_type = ir.FunctionType(kind, [operand.type for operand in operands])
            function = cgutils.get_or_insert_function(builder.module, function_type, name)
            return builder.call(function, operands)

        def splat(value: float) -> ir.Constant:
            return ir.Constant(_F32_V, [value] * VECTOR)

        def vector_at(i: Any) -> Any:
            return code.at(scores, i, 4 * VECTOR)

        def larger(i: Any, sums: list[Any]) -> list[Any]:
            return [call(f"llvm.maxnum.v{VECTOR}f32", _F32_V, sums[0], code.load(vector_at(i)))]

        (largest,) = code.loop(num_vectors, [splat(float("-inf"))], larger)
        top = code.splat(call(f"llvm.vector.reduce.fmax.v{VECTOR}f32", _F32, largest))

        def exponentials(i: Any, sums: list[Any]) -> list[Any]:
            x = builder.fsub(code.load(vector_at(i)), top)
            x = call(f"llvm.maxnum.v{VECTOR}f32", _F32_V, x, splat(-126.0))
            whole = call(f"llvm.rint.v{VECTOR}f32", _F32_V, x)
            part = builder.fsub(x, whole)
            power = splat(_EXP2[-1])
            for coefficient in reversed(_EXP2[:-1]):
                power = code.fma(power, part, splat(coefficient))
            exponent = builder.add(
                builder.fptosi(whole, _I32_V), ir.Constant(_I32_V, [127] * VECTOR)
            )
            shifted = builder.shl(exponent, ir.Constant(_I32_V, [23] * VECTOR))
            power = builder.fmul(power, builder.bitcast(shifted, _F32_V))
            code.store(power, vector_at(i))
            return [builder.fadd(sums[0], power)]

        (total,) = code.loop(num_vectors, [_ZERO], exponentials)
        lanes = [builder.extract_element(total, ir.Constant(_I32, i)) for i in range(VECTOR)]
        while len(lanes) > 1:
            lanes = [builder.fadd(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    return types.float32(_INT, _INT), generate


@intrinsic
def _widen(typing: Any, carrier: Any, address: Any) -> Any:
    """One element as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = _ELEMENTS[carrier.dtype]
        loaded = builder.load(builder.inttoptr(args[1], element.as_pointer()))
        if element is _F32:
            return loaded
        if element is not _I16:
            return builder.fpext(loaded, _F32)
        bits = builder.shl(builder.zext(loaded, _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, _F32)

    return types.float32(carrier, _INT), generate


@intrinsic
def _narrow(typing: Any, carrier: Any, value: Any, address: Any) -> Any:
    """Stores a float32 as one element, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, value, address = args
        element = _ELEMENTS[carrier.dtype]
        if element is not _F32 and element is not _I16:
            value = builder.fptrunc(value, element)
        elif element is _I16:
            bits = builder.bitcast(value, _I32)
            sixteen = ir.Constant(_I32, 16)
            odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(_I32, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
            is_nan = builder.fcmp_unordered("uno", value, value)
            kept = builder.select(is_nan, ir.Constant(_I32, 0x7FC00000), rounded)
            value = builder.trunc(builder.lshr(kept, sixteen), _I16)
        builder.store(value, builder.inttoptr(address, element.as_pointer()))
        return context.get_dummy_value()

    return types.void(carrier, types.float32, _INT), generate


@intrinsic
def _copy(typing: Any, carrier: Any, source: Any, target: Any) -> Any:
    """One element, as it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _ELEMENTS[carrier.dtype].as_pointer()
        _, source, target = args
        builder.store(
            builder.load(builder.inttoptr(source, pointer)), builder.inttoptr(target, pointer)
        )
        return context.get_dummy_value()

    return types.void(carrier, _INT, _INT), generate


# --- kernels -----------------------------------------------------------------------------------
#
# Addresses of tensors are integers. `carrier` is an empty array whose type stands for that of the
# elements, `size` their bytes. `shape` is (K, G, H, block_size). numba compiles a kernel once for
# each type of carrier.

_compiled: Final = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For what only the entry points call: without wrappers, and cached as a part of them."""


@_compiled
def _attend_heads(
    carrier: Any,
    size: int,
    shape: tuple[int, ...],
    heads: int,
    q: int,
    keys: int,
    values: int,
    out: int,
    table: Any,
    length: int,
    scale: float,
    scratch: Any,
) -> None:
    """`heads` query heads of one kv head of one row. `keys` and `values` are of that head in block
    0, `scratch` has a line per head for each of queries, scores and outputs."""
    num_kv, _, head_dim, block_size = shape
    room = scratch.shape[2]
    queries, scores, sums = scratch[0].ctypes.data, scratch[1].ctypes.data, scratch[2].ctypes.data
    num_vectors = (length + VECTOR - 1) // VECTOR
    block_bytes = num_kv * head_dim * block_size * size
    flat = scratch[0].reshape(-1)
    for i in range(heads * head_dim):
        flat[i] = _widen(carrier, q + i * size) * scale
    for vector in range(num_vectors):
        block, slot = divmod(vector * VECTOR, block_size)
        here = keys + table[block] * block_bytes + slot * size
        there = scores + vector * VECTOR * 4
        _score(carrier, heads, queries, here, block_size, head_dim, there, room)
    for head in range(heads):
        scratch[1, head, length : num_vectors * VECTOR] = -np.inf
        scratch[2, head, : head_dim + VECTOR] = 0.0
        scratch[0, head, 0] = _softmax(scores + head * room * 4, num_vectors)
    for first in range(0, length, block_size):
        block = values + table[first // block_size] * block_bytes
        count = min(block_size, length - first)
        weights = scores + first * 4
        feature = 0
        while feature < head_dim:
            here, there = block + feature * size, sums + feature * 4
            if head_dim - feature >= _WIDE * VECTOR:
                _accumulate_wide(carrier, heads, weights, room, here, head_dim, count, there, room)
                feature += _WIDE * VECTOR
            else:
                _accumulate_one(carrier, heads, weights, room, here, head_dim, count, there, room)
                feature += VECTOR
    for head in range(heads):
        inverse = 1.0 / scratch[0, head, 0]
        for i in range(head_dim):
            _narrow(carrier, scratch[2, head, i] * inverse, out + (head * head_dim + i) * size)


@njit(nogil=True, cache=True)
def attend(
    carrier: Any,
    size: int,
    shape: tuple[int, ...],
    q: int,
    q_stride: int,
    k: int,
    v: int,
    out: int,
    tables: Any,
    lengths: Any,
    scale: float,
    scratch: Any,
) -> None:
    """Rows of one token each, `q_stride` elements apart. `tables` int64 [R, B], `lengths` int64
    [R]; `scratch` float32 [3, MAX_HEADS, room], with room for the longest row and for H, rounded up
    to VECTOR, and VECTOR more."""
    num_kv, group, head_dim, block_size = shape
    head_bytes = head_dim * block_size * size
    for row in range(len(lengths)):
        for kv in range(num_kv):
            for start in range(0, group, MAX_HEADS):
                head = (kv * group + start) * head_dim
                _attend_heads(
                    carrier,
                    size,
                    shape,
                    min(MAX_HEADS, group - start),
                    q + (row * q_stride + head) * size,
                    k + kv * head_bytes,
                    v + kv * head_bytes,
                    out + (row * num_kv * group * head_dim + head) * size,
                    tables[row],
                    lengths[row],
                    scale,
                    scratch,
                )


@njit(nogil=True, cache=True)
def store(
    carrier: Any,
    size: int,
    shape: tuple[int, ...],
    k: int,
    v: int,
    k_new: int,
    k_stride: int,
    v_new: int,
    v_stride: int,
    slots: Any,
) -> None:
    """Keys and values of new tokens, `*_stride` elements apart, to their `slots` (int64 [T])."""
    num_kv, _, head_dim, block_size = shape
    for token in range(len(slots)):
        block, slot = divmod(slots[token], block_size)
        for kv in range(num_kv):
            head = (block * num_kv + kv) * head_dim * block_size
            for i in range(head_dim):
                at = kv * head_dim + i
                key, value = head + i * block_size + slot, head + slot * head_dim + i
                _copy(carrier, k_new + (token * k_stride + at) * size, k + key * size)
                _copy(carrier, v_new + (token * v_stride + at) * size, v + value * size)
