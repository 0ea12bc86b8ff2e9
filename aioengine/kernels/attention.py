"""Compiled attention of rows with one token over the paged cache, in place; and writing to it.

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
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    BFLOAT16,
    F32,
    FLOAT16,
    FLOAT32,
    IR_TYPES,
    Code,
    bytes_of,
    copy_element,
    element_bytes,
    inlined,
    kernel,
    load_element,
    pointer,
    store_element,
)
from aioengine.kernels.programs import op
from aioengine.kernels.team import run_job

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

TENSORS: Final = ("q", "k", "v", "out", "q_stride")
"""The first fields of the jobs over a cache: what comes with each layer."""

ATTEND: Final = np.dtype(
    [(name, np.int64) for name in TENSORS]  # q_stride: elements from token to token
    + [
        ("num_chunks", np.int64),
        ("tables", np.int64),  # int64 [R, B]
        ("table_stride", np.int64),
        ("lengths", np.int64),  # int64 [R]
        ("num_kv", np.int64),
        ("group", np.int64),
        ("head_dim", np.int64),
        ("block_size", np.int64),
        ("scratch", np.int64),  # float32 [threads, 3, MAX_HEADS, room]
        ("room", np.int64),  # scratch_room(longest row, H)
        ("scale", np.float64),  # of scores, in units of log 2
    ]
)
"""`args` of attention of rows with one token: addresses and sizes."""

STORE: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("k_new", "v_new", "k", "v"),  # addresses
            *("k_stride", "v_stride"),  # elements from token to token
            *("num_chunks", "slots", "num_tokens"),  # int64 [T]
            *("num_kv", "head_dim", "block_size"),
        )
    ]
)
STORED_TOKENS: Final = 16
"""Of a chunk: a block's worth, as the keys of a block share cache lines."""


def scratch_room(longest: int, head_dim: int) -> int:
    """For the scores of the longest row, or the outputs of a head."""
    return max(longest, head_dim) + 2 * VECTOR


@inlined
def _attend_heads(kind: Any, job: Any, row: int, kv: int, first: int, scratch: Any) -> None:
    """Up to MAX_HEADS query heads of a kv head, from `first` of its G on. `scratch` has a line per
    head for each of queries, scores and outputs."""
    head_dim, block_size, room = job.head_dim, job.block_size, job.room
    size = element_bytes(kind)
    heads = min(MAX_HEADS, job.group - first)
    place = (kv * job.group + first) * head_dim
    q = job.q + (row * job.q_stride + place) * size
    out = job.out + (row * job.num_kv * job.group * head_dim + place) * size
    keys = job.k + kv * head_dim * block_size * size
    values = job.v + kv * head_dim * block_size * size
    length = carray(pointer(job.lengths), row + 1, np.int64)[row]
    num_blocks = -(-length // block_size)
    table = carray(pointer(job.tables + row * job.table_stride * 8), num_blocks, np.int64)
    queries, scores, sums = scratch[0].ctypes.data, scratch[1].ctypes.data, scratch[2].ctypes.data
    num_vectors = (length + VECTOR - 1) // VECTOR
    block_bytes = job.num_kv * head_dim * block_size * size
    flat = scratch[0].reshape(-1)
    for i in range(heads * head_dim):
        flat[i] = load_element(kind, q + i * size) * job.scale
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


@inlined
def _attend_row(kind: Any, args: int, chunk: int, thread: int) -> None:
    job = carray(pointer(args), 1, ATTEND)[0]
    row, kv = divmod(chunk, job.num_kv)
    lines = pointer(job.scratch + thread * 3 * MAX_HEADS * job.room * 4)
    scratch = carray(lines, (3, MAX_HEADS, job.room), np.float32)
    for first in range(0, job.group, MAX_HEADS):
        _attend_heads(kind, job, row, kv, first, scratch)


@kernel
def attend_float32(args: int, chunk: int, thread: int) -> None:
    """`args` is an ATTEND; chunk i is kv head i % K of row i // K."""
    _attend_row(FLOAT32, args, chunk, thread)


@kernel
def attend_bfloat16(args: int, chunk: int, thread: int) -> None:
    _attend_row(BFLOAT16, args, chunk, thread)


@kernel
def attend_float16(args: int, chunk: int, thread: int) -> None:
    _attend_row(FLOAT16, args, chunk, thread)


@op
def attend_layer(
    control: int,
    num_helpers: int,
    kernel_address: int,
    args: int,
    q: int,
    k: int,
    v: int,
    out: int,
    q_stride: int,
) -> None:
    """The rest of the record is of the step."""
    job = carray(pointer(args), 1, ATTEND)[0]
    job.q, job.k, job.v, job.out, job.q_stride = q, k, v, out, q_stride
    run_job(control, num_helpers, kernel_address, args, job.num_chunks)


@inlined
def _store(kind: Any, args: int, chunk: int) -> None:
    job = carray(pointer(args), 1, STORE)[0]
    num_kv, head_dim, block_size = job.num_kv, job.head_dim, job.block_size
    size = element_bytes(kind)
    slots = carray(pointer(job.slots), job.num_tokens, np.int64)
    first = chunk * STORED_TOKENS
    for token in range(first, min(first + STORED_TOKENS, job.num_tokens)):
        block, slot = divmod(slots[token], block_size)
        for kv in range(num_kv):
            head = (block * num_kv + kv) * head_dim * block_size
            k_new = job.k_new + (token * job.k_stride + kv * head_dim) * size
            v_new = job.v_new + (token * job.v_stride + kv * head_dim) * size
            k, v = job.k + (head + slot) * size, job.v + (head + slot * head_dim) * size
            for i in range(head_dim):
                copy_element(kind, k_new + i * size, k + i * block_size * size)
                copy_element(kind, v_new + i * size, v + i * size)


@op
def store_layer(
    control: int,
    num_helpers: int,
    kernel_address: int,
    args: int,
    k_new: int,
    v_new: int,
    k: int,
    v: int,
    k_stride: int,
    v_stride: int,
) -> None:
    """The rest of the record is of the step."""
    job = carray(pointer(args), 1, STORE)[0]
    job.k_new, job.v_new, job.k, job.v = k_new, v_new, k, v
    job.k_stride, job.v_stride = k_stride, v_stride
    run_job(control, num_helpers, kernel_address, args, job.num_chunks)


@kernel
def store_4_bytes(args: int, chunk: int, thread: int) -> None:
    """`args` is a STORE; chunk i is its i-th STORED_TOKENS new tokens."""
    _store(FLOAT32, args, chunk)


@kernel
def store_2_bytes(args: int, chunk: int, thread: int) -> None:
    _store(BFLOAT16, args, chunk)
