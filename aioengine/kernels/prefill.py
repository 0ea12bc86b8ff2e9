"""Compiled causal attention of rows with several tokens, straight from the paged cache.

Shapes: K kv heads · G query heads of a kv head · H head_dim · M = ROWS · W = COLUMNS.

**A chunk** is a tile of one row's tokens with the G query heads of one kv head, so up to TILE_ROWS
query rows, over all keys that the tile's last token sees. It goes through the keys KEYS at a time:
they and their values are copied, as float32, into panels in the thread's scratch, which all query
rows of the tile reuse, M at a time: scores, online softmax, weighted sum of values.

**Products.** Both are `_multiply`: M × W results in registers, M numbers spread over a vector each
and W numbers of a panel a step. A panel holds W columns (keys, or features) together, so that they
are adjacent at every step. Missing query rows are zeros, and missing columns whatever lies there:
lanes do not mix, and nothing reads those results.

**Order of sums.** The keys of a step are those at multiples of KEYS, whatever the tile, and keys
that a token does not see get weight 0. So a token's result does not depend on how its prompt was
cut into chunks, nor on the number of threads.

**Others' values.** Scores behind a token's own position are overwritten, whatever they are, and
values behind the tile's last token are not read: what another request left there (NaN, even) cannot
reach this one. As in `attention`, the last vector of values may reach behind the tensor.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.attention import TENSORS
from aioengine.kernels.codegen import (
    BFLOAT16,
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    IR_TYPES,
    NUM_REGISTERS,
    REGISTER_LANES,
    Code,
    bytes_of,
    element_bytes,
    fill_floats,
    for_each,
    inlined,
    kernel,
    load_element,
    pointer,
)

_VECTORS: Final = 4 if (REGISTER_LANES, NUM_REGISTERS) == (4, 32) else 2
"""Of results, in a row of them. The narrow vectors of NEON need more for their loads to keep up."""
ROWS: Final = (NUM_REGISTERS - _VECTORS - 2) // _VECTORS
"""Two registers are left: the number that is spread, and one for the compiler."""
COLUMNS: Final = _VECTORS * REGISTER_LANES
_PACKED: Final = min(COLUMNS, 16)
"""Elements copied to a panel at a time: what blocks (of 16, 32, … slots) and panels consist of."""
KEYS: Final = 256
TILE_ROWS: Final = 96

JOB: Final = np.dtype(
    [(name, np.int64) for name in TENSORS]
    + [
        ("tables", np.int64),  # int64 [R, B]
        ("table_stride", np.int64),
        ("tiles", np.int64),  # TILE [·]
        ("num_kv", np.int64),
        ("group", np.int64),
        ("head_dim", np.int64),
        ("block_size", np.int64),
        ("scratch", np.int64),  # float32 [threads, scratch_floats]
        ("scratch_floats", np.int64),
        ("scale", np.float64),  # of scores, in units of log 2
    ]
)
"""`args` of the kernels: addresses and sizes."""
TILE: Final = np.dtype(
    [
        ("row", np.int64),  # whose table
        ("token", np.int64),  # of the step, the tile's first
        ("position", np.int64),  # that token's
        ("num_tokens", np.int64),
    ]
)
TILE_BYTES: Final = TILE.itemsize
_INT: Final = types.int64


def tokens_of_tile(group: int) -> int:
    return max(1, TILE_ROWS // group)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


_KEYS_ROOM: Final = _rounded(KEYS, COLUMNS)


# --- pieces of generated code --------------------------------------------------------------------


def _multiply(has_start: bool) -> Any:
    @intrinsic
    def multiply(
        typing: Any,
        a: Any,
        a_stride: Any,
        panel: Any,
        depth: Any,
        out: Any,
        out_stride: Any,
        factors: Any,
    ) -> Any:
        """ROWS × COLUMNS of `out` = a · panel, added to `out` × factors if it has a start.

        Addresses of float32: `a` [ROWS, depth], `panel` [depth, COLUMNS], `factors` [ROWS].
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, a_stride, panel, depth, out, out_stride, factors = args
            code = Code(builder)
            rows = [code.at(a, builder.mul(code.const(m), a_stride), 4) for m in range(ROWS)]
            places = [
                builder.add(
                    code.at(out, builder.mul(code.const(m), out_stride), 4),
                    code.const(vector * REGISTER_LANES * 4),
                )
                for m in range(ROWS)
                for vector in range(_VECTORS)
            ]

            def start(m: int, vector: int) -> Any:
                if not has_start:
                    return code.zero
                factor = code.splat(code.load(code.at(factors, code.const(m), 4), F32))
                return builder.fmul(code.load(places[m * _VECTORS + vector]), factor)

            def add(i: Any, sums: list[Any]) -> list[Any]:
                columns = code.at(panel, i, COLUMNS * 4)
                loaded = [
                    code.load(builder.add(columns, code.const(vector * REGISTER_LANES * 4)))
                    for vector in range(_VECTORS)
                ]
                results = []
                for m in range(ROWS):
                    spread = code.splat(code.load(code.at(rows[m], i, 4), F32))
                    results += [
                        code.fma(spread, loaded[vector], sums[m * _VECTORS + vector])
                        for vector in range(_VECTORS)
                    ]
                return results

            starts = [start(m, vector) for m in range(ROWS) for vector in range(_VECTORS)]
            for place, total in zip(places, code.loop(depth, starts, add), strict=True):
                code.store(total, place)
            return context.get_dummy_value()

        return types.void(*[_INT] * 7), generate

    return multiply


_product: Final = _multiply(has_start=False)
_add_product: Final = _multiply(has_start=True)


@intrinsic
def _pack(
    typing: Any, kind: Any, source: Any, stride: Any, target: Any, target_stride: Any, count: Any
) -> Any:
    """`count` vectors of _PACKED elements, `stride` apart, as float32, `target_stride` apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, stride, target, target_stride, count = args
        code, element = Code(builder, _PACKED), IR_TYPES[kind.dtype]
        step = builder.mul(stride, code.const(bytes_of(element)))
        target_step = builder.mul(target_stride, code.const(4))

        def copy(i: Any, sums: list[Any]) -> list[Any]:
            values = code.load_elements(builder.add(source, builder.mul(i, step)), element)
            code.store(values, builder.add(target, builder.mul(i, target_step)))
            return []

        code.loop(count, [], copy)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 5), generate


@intrinsic
def _load_scaled(typing: Any, kind: Any, source: Any, count: Any, factor: Any, target: Any) -> Any:
    """`count` elements, times a factor, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, count, factor, target = args
        element = IR_TYPES[kind.dtype]

        def copy(code: Code, i: Any) -> None:
            values = code.load_elements(code.at(source, i, bytes_of(element)), element)
            code.store(builder.fmul(values, code.splat(factor)), code.at(target, i, 4))

        for_each(builder, count, copy)
        return context.get_dummy_value()

    return types.void(kind, _INT, _INT, types.float32, _INT), generate


@intrinsic
def _store_scaled(typing: Any, kind: Any, source: Any, count: Any, factor: Any, target: Any) -> Any:
    """The way back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, count, factor, target = args
        element = IR_TYPES[kind.dtype]

        def copy(code: Code, i: Any) -> None:
            values = builder.fmul(code.load(code.at(source, i, 4)), code.splat(factor))
            code.store_elements(values, code.at(target, i, bytes_of(element)), element)

        for_each(builder, count, copy)
        return context.get_dummy_value()

    return types.void(kind, _INT, _INT, types.float32, _INT), generate


@intrinsic
def _weigh(typing: Any, scores: Any, num_vectors: Any, state: Any, factor: Any) -> Any:
    """One step of online softmax for a row. Addresses of float32.

    Scores, in units of log 2, become weights 2^(score - largest so far). `state` are the largest so
    far and the sum of weights; `factor` becomes what earlier weights are to be multiplied with.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, num_vectors, state, factor = args
        code = Code(builder)
        total_at = builder.add(state, code.const(4))

        def vector_at(i: Any) -> Any:
            return code.at(scores, i, 4 * REGISTER_LANES)

        def larger(i: Any, sums: list[Any]) -> list[Any]:
            return [code.max(sums[0], code.load(vector_at(i)))]

        before = code.splat(code.load(state, F32))
        (largest,) = code.loop(num_vectors, [before], larger)
        top = code.max_lanes(largest)
        spread = code.splat(top)

        def exponentials(i: Any, sums: list[Any]) -> list[Any]:
            weights = code.exp2(builder.fsub(code.load(vector_at(i)), spread))
            code.store(weights, vector_at(i))
            return [builder.fadd(sums[0], weights)]

        (weights,) = code.loop(num_vectors, [code.zero], exponentials)
        scaled = builder.extract_element(code.exp2(builder.fsub(before, spread)), I32(0))
        total = builder.fmul(code.load(total_at, F32), scaled)
        code.store(builder.fadd(total, code.sum_lanes(weights)), total_at)
        code.store(top, state)
        code.store(scaled, factor)
        return context.get_dummy_value()

    return types.void(*[_INT] * 4), generate


# --- kernels -------------------------------------------------------------------------------------


class _Scratch(NamedTuple):
    """A thread's: addresses of float32. Weights replace the scores."""

    keys: int  # panels [·, H, COLUMNS]
    values: int  # panels [·, KEYS, COLUMNS]
    queries: int  # [rows, H]
    sums: int  # [rows, H rounded up to COLUMNS]
    states: int  # [rows, 2], see _weigh
    scores: int  # [ROWS, _KEYS_ROOM]
    factors: int  # [ROWS]
    num_rows: int
    num_features: int  # of the sums


def scratch_floats(group: int, head_dim: int) -> int:
    """What a thread needs."""
    rows, features = _rounded(tokens_of_tile(group) * group, ROWS), _rounded(head_dim, COLUMNS)
    panels = _KEYS_ROOM * head_dim + KEYS * features
    return _rounded(panels + rows * (head_dim + features + 2) + ROWS * (_KEYS_ROOM + 1), 32)


@inlined
def _scratch_of(job: Any, num_tokens: int, thread: int) -> _Scratch:
    head_dim = job.head_dim
    features = -(-head_dim // COLUMNS) * COLUMNS
    rows = -(-num_tokens * job.group // ROWS) * ROWS
    keys = job.scratch + thread * job.scratch_floats * 4
    values = keys + _KEYS_ROOM * head_dim * 4
    queries = values + KEYS * features * 4
    sums = queries + rows * head_dim * 4
    states = sums + rows * features * 4
    scores = states + rows * 2 * 4
    factors = scores + ROWS * _KEYS_ROOM * 4
    return _Scratch(keys, values, queries, sums, states, scores, factors, rows, features)


@inlined
def _pack_keys(kind: Any, job: Any, kv: int, table: Any, first: int, end: int, panels: int) -> None:
    """Keys [first, end); columns from `end` on are undefined."""
    head_dim, block_size = job.head_dim, job.block_size
    for key in range(first, end, _PACKED):
        block, slot = divmod(key, block_size)
        head = (table[block] * job.num_kv + kv) * head_dim * block_size
        source = job.k + (head + slot) * element_bytes(kind)
        panel, column = divmod(key - first, COLUMNS)
        target = panels + (panel * head_dim * COLUMNS + column) * 4
        _pack(kind, source, block_size, target, COLUMNS, head_dim)


@inlined
def _pack_values(
    kind: Any, job: Any, kv: int, table: Any, first: int, end: int, panels: int
) -> None:
    """Values [first, end); columns from H on are undefined."""
    head_dim, block_size = job.head_dim, job.block_size
    key = first
    while key < end:
        block, slot = divmod(key, block_size)
        count = min(block_size - slot, end - key)
        head = ((table[block] * job.num_kv + kv) * block_size + slot) * head_dim
        for feature in range(0, head_dim, _PACKED):
            source = job.v + (head + feature) * element_bytes(kind)
            panel, column = divmod(feature, COLUMNS)
            target = panels + ((panel * KEYS + key - first) * COLUMNS + column) * 4
            _pack(kind, source, head_dim, target, COLUMNS, count)
        key += count


@inlined
def _load_queries(kind: Any, job: Any, kv: int, tile: Any, scratch: Any) -> None:
    """Query rows, scaled: token by token, the G heads of a token together; zeros behind them."""
    width, size = job.group * job.head_dim, element_bytes(kind)
    for i in range(tile.num_tokens):
        source = job.q + ((tile.token + i) * job.q_stride + kv * width) * size
        _load_scaled(kind, source, width, job.scale, scratch.queries + i * width * 4)
    done = tile.num_tokens * width
    fill_floats(scratch.queries + done * 4, scratch.num_rows * job.head_dim - done, 0.0)


@inlined
def _store_outputs(kind: Any, job: Any, kv: int, tile: Any, scratch: Any) -> None:
    head_dim, group, size = job.head_dim, job.group, element_bytes(kind)
    for row in range(tile.num_tokens * group):
        token, head = divmod(row, group)
        place = (((tile.token + token) * job.num_kv + kv) * group + head) * head_dim
        sums = scratch.sums + row * scratch.num_features * 4
        inverse = np.float32(1.0) / load_element(FLOAT32, scratch.states + (2 * row + 1) * 4)
        _store_scaled(kind, sums, head_dim, inverse, job.out + place * size)


@inlined
def _attend_rows(job: Any, tile: Any, scratch: Any, row: int, first: int, end: int) -> None:
    """ROWS query rows over keys [first, end), of which each sees those up to its own position."""
    head_dim, last = job.head_dim, tile.num_tokens - 1
    most = min(end, tile.position + min((row + ROWS - 1) // job.group, last) + 1) - first
    queries = scratch.queries + row * head_dim * 4
    for column in range(0, most, COLUMNS):
        panel, scores = scratch.keys + column * head_dim * 4, scratch.scores + column * 4
        _product(queries, head_dim, panel, head_dim, scores, _KEYS_ROOM, 0)
    for i in range(ROWS):
        count = min(end, tile.position + min((row + i) // job.group, last) + 1) - first
        count = max(count, 0)
        num_vectors = (count + REGISTER_LANES - 1) // REGISTER_LANES
        scores = scratch.scores + i * _KEYS_ROOM * 4
        in_vectors = num_vectors * REGISTER_LANES
        fill_floats(scores + count * 4, in_vectors - count, -np.inf)
        _weigh(scores, num_vectors, scratch.states + (row + i) * 8, scratch.factors + i * 4)
        fill_floats(scores + in_vectors * 4, most - in_vectors, 0.0)
    for feature in range(0, head_dim, COLUMNS):
        panel = scratch.values + feature * KEYS * 4
        sums = scratch.sums + (row * scratch.num_features + feature) * 4
        _add_product(
            scratch.scores, _KEYS_ROOM, panel, most, sums, scratch.num_features, scratch.factors
        )


@inlined
def _attend_tile(kind: Any, args: int, chunk: int, thread: int) -> None:
    job = carray(pointer(args), 1, JOB)[0]
    index, kv = divmod(chunk, job.num_kv)
    tile = carray(pointer(job.tiles + index * TILE_BYTES), 1, TILE)[0]
    scratch = _scratch_of(job, tile.num_tokens, thread)
    length = tile.position + tile.num_tokens
    num_blocks = -(-length // job.block_size)
    table = carray(pointer(job.tables + tile.row * job.table_stride * 8), num_blocks, np.int64)
    _load_queries(kind, job, kv, tile, scratch)
    fill_floats(scratch.sums, scratch.num_rows * scratch.num_features, 0.0)
    for row in range(scratch.num_rows):
        fill_floats(scratch.states + row * 8, 1, -np.inf)
        fill_floats(scratch.states + row * 8 + 4, 1, 0.0)
    for first in range(0, length, KEYS):
        end = min(first + KEYS, length)
        _pack_keys(kind, job, kv, table, first, end, scratch.keys)
        _pack_values(kind, job, kv, table, first, end, scratch.values)
        for row in range(0, tile.num_tokens * job.group, ROWS):
            if tile.position + (row + ROWS - 1) // job.group >= first:
                _attend_rows(job, tile, scratch, row, first, end)
    _store_outputs(kind, job, kv, tile, scratch)


@kernel
def attend_float32(args: int, chunk: int, thread: int) -> None:
    """`args` is a JOB; chunk i is kv head i % K of tile i // K."""
    _attend_tile(FLOAT32, args, chunk, thread)


@kernel
def attend_bfloat16(args: int, chunk: int, thread: int) -> None:
    _attend_tile(BFLOAT16, args, chunk, thread)


@kernel
def attend_float16(args: int, chunk: int, thread: int) -> None:
    _attend_tile(FLOAT16, args, chunk, thread)
