"""Compiled attention over the paged cache of a CPU, in place. Needs numba.

Shapes: R rows · K kv heads · G query heads of a kv head · H head_dim · L cached tokens.

Keys lie as [block, K, H, slot] and values as [block, K, slot, H], so that the inner loops of both
products run over adjacent elements: scores of 16 slots at a time, outputs of 16 features at a time.
Vectors are of float32 whatever the type of the cache; LLVM lowers them to what the processor has.

A row's scores stay in float32 scratch between the two products. Slots behind its last token are
read for scores and then overwritten by minus infinity, and are not read for values: what another
request left there (NaN, even) cannot reach it. Where H is no multiple of 16 the last vector of
values reads into the next slot, and behind the tensor after the last one, which must have room for
it; those lanes are dropped.
"""

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    F32,
    IR_TYPES,
    Code,
    bytes_of,
    copy_element,
    element_bytes,
    entry,
    inlined,
    load_element,
    store_element,
)

VECTOR: Final = 16
"""Elements worked on at a time: one register of AVX-512, two of AVX2, four of NEON."""
MAX_HEADS: Final = 4
"""Query heads of a kv head that share a pass over its keys or values."""
_WIDE: Final = 4
"""Vectors of features that share a pass over the values."""
LOG2_E: Final = 1.4426950408889634
_INT: Final = types.int64


@intrinsic
def _score(
    typing: Any,
    kind: Any,
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
        code, element = Code(builder, VECTOR), IR_TYPES[kind.dtype]
        row_bytes = builder.mul(stride, code.const(bytes_of(element)))

        def add(i: Any, sums: list[Any]) -> list[Any]:
            key = code.load_elements(builder.add(keys, builder.mul(i, row_bytes)), element)
            products = []
            for head, total in enumerate(sums):
                index = builder.add(i, builder.mul(code.const(head), head_dim))
                query = code.splat(code.load(code.at(q, index, 4), F32))
                products.append(code.fma(query, key, total))
            return products

        def emit(n: int) -> None:
            for head, total in enumerate(code.loop(head_dim, [code.zero] * n, add)):
                code.store(total, code.at(scores, builder.mul(code.const(head), scores_stride), 4))

        code.for_each_count(num_heads, MAX_HEADS, emit)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 7), generate


def _accumulate(num_vectors: int) -> Any:
    @intrinsic
    def accumulate(
        typing: Any,
        kind: Any,
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
            code, element = Code(builder, VECTOR), IR_TYPES[kind.dtype]
            row_bytes = builder.mul(stride, code.const(bytes_of(element)))
            vector_bytes = VECTOR * bytes_of(element)

            def out_at(head: int, vector: int) -> Any:
                index = builder.mul(code.const(head), out_stride)
                return code.at(out, builder.add(index, code.const(vector * VECTOR)), 4)

            def add(i: Any, sums: list[Any]) -> list[Any]:
                row = builder.add(values, builder.mul(i, row_bytes))
                loaded = [
                    code.load_elements(builder.add(row, code.const(vector * vector_bytes)), element)
                    for vector in range(num_vectors)
                ]
                products = []
                for head in range(len(sums) // num_vectors):
                    index = builder.add(i, builder.mul(code.const(head), weights_stride))
                    weight = code.splat(code.load(code.at(weights, index, 4), F32))
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

            code.for_each_count(num_heads, MAX_HEADS, emit)
            return context.get_dummy_value()

        return types.void(kind, *[_INT] * 8), generate

    return accumulate


_accumulate_wide: Final = _accumulate(_WIDE)
_accumulate_one: Final = _accumulate(1)


@intrinsic
def _softmax(typing: Any, scores: Any, num_vectors: Any) -> Any:
    """Scores, in units of log 2, become weights 2^(score - largest); their sum is returned.

    Addresses of float32; at least one score is finite.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, num_vectors = args
        code = Code(builder, VECTOR)

        def vector_at(i: Any) -> Any:
            return code.at(scores, i, 4 * VECTOR)

        def larger(i: Any, sums: list[Any]) -> list[Any]:
            return [code.max(sums[0], code.load(vector_at(i)))]

        (largest,) = code.loop(num_vectors, [code.fill(float("-inf"))], larger)
        top = code.splat(code.max_lanes(largest))

        def exponentials(i: Any, sums: list[Any]) -> list[Any]:
            power = code.exp2(builder.fsub(code.load(vector_at(i)), top))
            code.store(power, vector_at(i))
            return [builder.fadd(sums[0], power)]

        (total,) = code.loop(num_vectors, [code.zero], exponentials)
        return code.sum_lanes(total)

    return types.float32(_INT, _INT), generate


# --- kernels -----------------------------------------------------------------------------------
#
# Addresses of tensors are integers. `kind` is the type of the elements (codegen.FLOAT32, …),
# `shape` is (K, G, H, block_size). numba compiles a kernel once for each kind.


@inlined
def _attend_heads(
    kind: Any,
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
    size = element_bytes(kind)
    room = scratch.shape[2]
    queries, scores, sums = scratch[0].ctypes.data, scratch[1].ctypes.data, scratch[2].ctypes.data
    num_vectors = (length + VECTOR - 1) // VECTOR
    block_bytes = num_kv * head_dim * block_size * size
    flat = scratch[0].reshape(-1)
    for i in range(heads * head_dim):
        flat[i] = load_element(kind, q + i * size) * scale
    for vector in range(num_vectors):
        block, slot = divmod(vector * VECTOR, block_size)
        here = keys + table[block] * block_bytes + slot * size
        there = scores + vector * VECTOR * 4
        _score(kind, heads, queries, here, block_size, head_dim, there, room)
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
                _accumulate_wide(kind, heads, weights, room, here, head_dim, count, there, room)
                feature += _WIDE * VECTOR
            else:
                _accumulate_one(kind, heads, weights, room, here, head_dim, count, there, room)
                feature += VECTOR
    for head in range(heads):
        inverse = 1.0 / scratch[0, head, 0]
        for i in range(head_dim):
            store_element(kind, scratch[2, head, i] * inverse, out + (head * head_dim + i) * size)


@entry
def attend(
    kind: Any,
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
    size = element_bytes(kind)
    head_bytes = head_dim * block_size * size
    for row in range(len(lengths)):
        for kv in range(num_kv):
            for start in range(0, group, MAX_HEADS):
                head = (kv * group + start) * head_dim
                _attend_heads(
                    kind,
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


@entry
def store(
    kind: Any,
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
    size = element_bytes(kind)
    for token in range(len(slots)):
        block, slot = divmod(slots[token], block_size)
        for kv in range(num_kv):
            head = (block * num_kv + kv) * head_dim * block_size
            for i in range(head_dim):
                at = kv * head_dim + i
                key, value = head + i * block_size + slot, head + slot * head_dim + i
                copy_element(kind, k_new + (token * k_stride + at) * size, k + key * size)
                copy_element(kind, v_new + (token * v_stride + at) * size, v + value * size)
