"""Compiled causal attention over the paged cache, in place, for rows with one token and with more.

Shapes: K kv heads · G query heads of a kv head · H head_dim · D = H, or H / 2 pairs.

Keys lie as [block, K, D, slot] and values as [block, K, slot, H], or, as pairs (see
`attention_tiles`), [block, K, slot / 2, H], so that the inner loops of both products run over
adjacent items: the scores of many slots at a time, the sums of many features.

**A chunk** is a tile with one kv head. A tile are up to TILE_ROWS query rows: some tokens of a row
with the G query heads. It goes through the keys KEYS at a time, a step: scores, softmax, weighted
values. So its scratch does not grow with the context.

**Long rows.** A row with one token is cut into parts of PART_STEPS steps, each a tile of its own,
which leaves a line (see `attention_tiles`) of every step. Who is ready last adds them up.

**Order of sums.** Steps stand at multiples of KEYS, each with a softmax of its own, and their lines
are added up in order. So a token's result depends on nothing but its own context: not on how its
prompt was cut into chunks, on parts, on other rows, nor on the number of threads.

**Others' values.** Scores behind a token's own position are overwritten, whatever they are, and
values behind the tile's last token are not read, or their bits are dropped: what another request
left there (NaN, even) cannot reach this one. Where H is no multiple of REGISTER_LANES the last
vector of values reads into the next slot, and behind the tensor after the last one, which must have
room for it; those lanes are dropped.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray

from aioengine.kernels.atomics import add, store_release
from aioengine.kernels.attention_tiles import (
    FEATURES,
    ROWS,
    STEP_UNITS,
    VECTOR,
    fold,
    load_items,
    score,
    store_scaled,
    sum_values_one,
    sum_values_wide,
    weigh,
)
from aioengine.kernels.codegen import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    PAIR,
    REGISTER_LANES,
    element_bytes,
    entry,
    fill_floats,
    inlined,
    kernel,
    load_element,
    pointer,
)
from aioengine.kernels.programs import op
from aioengine.kernels.team import run_job

KEYS: Final = STEP_UNITS * VECTOR
"""Of a step."""
PART_STEPS: Final = 2
PART_KEYS: Final = PART_STEPS * KEYS
TILE_ROWS: Final = 96
"""Which use a step's keys and values while these are in cache."""
WHOLE: Final = -1
"""The lines of a tile that is no part."""

ATTEND: Final = np.dtype(
    [
        # of a layer
        *((name, np.int64) for name in ("q", "k", "v", "out")),  # addresses
        ("q_stride", np.int64),  # elements from token to token
        # of a step
        ("num_chunks", np.int64),
        ("tables", np.int64),  # int64 [R, B]
        ("table_stride", np.int64),
        ("lengths", np.int64),  # int64 [R]
        ("tiles", np.int64),  # TILE [·]
        ("lines", np.int64),  # float32 [steps of rows that are cut, N, line_floats]
        ("counters", np.int64),  # int64 [the same, K]; zeros between jobs
        # of the model
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
        ("row", np.int64),  # whose table and length
        ("token", np.int64),  # of the step, the tile's first
        ("back", np.int64),  # from the row's length to that token's position
        ("num_tokens", np.int64),
        ("first_step", np.int64),  # of a part
        ("lines", np.int64),  # the row's first step in the job's lines, or WHOLE
    ]
)
TILE_BYTES: Final = TILE.itemsize


@entry
def tile_decodes(tiles: int, room: int, lengths: int, num_rows: int) -> int:
    """Writes the tiles of the first `num_rows` rows, with one token each, if there is room for all
    of them: one for each part. Returns how many there are, and 2^32 · the steps that leave lines.
    """
    table = carray(pointer(tiles), room, TILE)
    row_lengths = carray(pointer(lengths), num_rows, np.int64)
    num_tiles, num_steps = 0, 0
    for row in range(num_rows):
        num_parts = -(-row_lengths[row] // PART_KEYS)
        lines = num_steps if num_parts > 1 else WHOLE
        for part in range(num_parts):
            if num_tiles < room:
                tile = table[num_tiles]
                tile.row = tile.token = row
                tile.back = tile.num_tokens = 1
                tile.first_step = part * PART_STEPS
                tile.lines = lines
            num_tiles += 1
        if num_parts > 1:
            num_steps += num_parts * PART_STEPS
    return num_tiles + (num_steps << 32)


def tokens_of_tile(group: int) -> int:
    return max(1, TILE_ROWS // group)


def line_floats(head_dim: int) -> int:
    return _rounded(head_dim, REGISTER_LANES) + REGISTER_LANES


def scratch_floats(group: int, head_dim: int) -> int:
    """What a thread needs."""
    rows = tokens_of_tile(group) * group
    floats = 2 * 2 * STEP_UNITS + ROWS * _SCORES + rows * head_dim
    floats += (rows + ROWS) * line_floats(head_dim)
    return _rounded(floats, 32)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


_SCORES: Final = KEYS + 2 * REGISTER_LANES
"""Of a row, with what is written behind the last."""


class _Work(NamedTuple):
    """A chunk: sizes and addresses that hold for all its steps."""

    kv: int
    rows: int  # query rows
    position: int  # of the first token
    length: int  # that the last token sees
    depth: int  # D
    line_bytes: int
    stats: int  # bytes from the begin of a line on
    table: int  # int64 [B]
    units: int  # int64 [2, STEP_UNITS]: of keys, of values
    scores: int  # float32 [ROWS, _SCORES]
    queries: int  # items [rows, D]
    lines: int  # float32 [rows, line_floats], of all steps so far
    step_lines: int  # [ROWS, line_floats], of one step


@inlined
def _numbers(kind: Any) -> int:
    """Of an item."""
    return 2 if kind is PAIR else 1


@inlined
def _number_bytes(kind: Any) -> int:
    return element_bytes(kind) // _numbers(kind)


@inlined
def _work_of(kind: Any, job: Any, tile: Any, kv: int, thread: int) -> _Work:
    position = carray(pointer(job.lengths), tile.row + 1, np.int64)[tile.row] - tile.back
    rows = tile.num_tokens * job.group
    stats = -(-job.head_dim // REGISTER_LANES) * REGISTER_LANES * 4
    line_bytes = stats + REGISTER_LANES * 4
    units = job.scratch + thread * job.scratch_floats * 4
    scores = units + 2 * STEP_UNITS * 8
    step_lines = scores + ROWS * _SCORES * 4
    lines = step_lines + ROWS * line_bytes
    queries = lines + rows * line_bytes
    return _Work(
        kv,
        rows,
        position,
        position + tile.num_tokens,
        job.head_dim // _numbers(kind),
        line_bytes,
        stats,
        job.tables + tile.row * job.table_stride * 8,
        units,
        scores,
        queries,
        lines,
        step_lines,
    )


@inlined
def _find_units(kind: Any, job: Any, work: Any, key: int) -> None:
    """The addresses of units of keys and values for a step from this key on; where there are fewer,
    the last is repeated."""
    block_size = job.block_size
    slot_bytes = job.head_dim * _number_bytes(kind)
    head_bytes = block_size * slot_bytes
    table = carray(pointer(work.table), -(-work.length // block_size), np.int64)
    units = carray(pointer(work.units), (2, STEP_UNITS), np.int64)
    block, slot = divmod(key, block_size)
    for i in range(STEP_UNITS):
        head = (table[block] * job.num_kv + work.kv) * head_bytes
        units[0, i] = job.k + head + slot * element_bytes(kind)
        units[1, i] = job.v + head + slot * slot_bytes
        if key + (i + 1) * VECTOR < work.length:
            slot += VECTOR
            if slot == block_size:
                block, slot = block + 1, 0


@inlined
def _begin_lines(work: Any) -> None:
    """Lines of no keys."""
    fill_floats(work.lines, work.rows * work.line_bytes // 4, 0.0)
    for i in range(work.rows):
        fill_floats(work.lines + i * work.line_bytes + work.stats, 1, -np.inf)


@inlined
def _fold_lines(work: Any, row: int, num: int, others: int) -> None:
    """Adds these lines to those of all steps, from a row on."""
    line = work.lines + row * work.line_bytes
    for i in range(num):
        offset = i * work.line_bytes
        fold(line + offset, others + offset, work.stats, work.stats // (4 * REGISTER_LANES))


@inlined
def _load_queries(kind: Any, job: Any, tile: Any, work: Any) -> None:
    """Token by token, the G heads of a token together."""
    width = job.group * work.depth
    for i in range(tile.num_tokens):
        source = (tile.token + i) * job.q_stride + work.kv * job.group * job.head_dim
        target = work.queries + i * width * 4
        load_items(kind, job.q + source * _number_bytes(kind), width, target)


@inlined
def _store_outputs(kind: Any, job: Any, tile: Any, work: Any) -> None:
    for row in range(work.rows):
        token, head = divmod(row, job.group)
        place = ((tile.token + token) * job.num_kv + work.kv) * job.group + head
        line = work.lines + row * work.line_bytes
        inverse = np.float32(1.0) / load_element(FLOAT32, line + work.stats + 4)
        out = job.out + place * job.head_dim * _number_bytes(kind)
        store_scaled(kind, line, job.head_dim, inverse, out)


@inlined
def _weigh_rows(
    kind: Any, job: Any, work: Any, row: int, num: int, key: int, most: int, lines: int
) -> None:
    """Scores of rows, of a step from this key on, become weights; the last row sees `most` keys."""
    numbers = _numbers(kind)
    vector = REGISTER_LANES * numbers
    for i in range(num):
        count = work.position + (row + i) // job.group + 1 - key
        count = max(0, min(most, count))
        num_vectors = (count + vector - 1) // vector
        scores = work.scores + i * _SCORES * 4
        fill_floats(scores + count * 4, vector, -np.inf)
        stats = lines + i * work.line_bytes + work.stats
        weigh(kind, scores, num_vectors, np.float32(job.scale), stats)
        items = num_vectors * REGISTER_LANES
        fill_floats(scores + items * 4, (most + numbers - 1) // numbers - items, 0.0)


@inlined
def _attend_rows(kind: Any, job: Any, work: Any, row: int, num: int, key: int, lines: int) -> None:
    """Lines of up to ROWS query rows over a step, whose units are found, from this key on."""
    head_dim, size = job.head_dim, element_bytes(kind)
    last = work.position + (row + num - 1) // job.group
    most = min(min(key + KEYS, work.length), last + 1) - key
    queries, scores_bytes = work.queries + row * work.depth * 4, _SCORES * 4
    key_bytes, value_bytes = job.block_size * size, head_dim * size
    score(kind, num, queries, work.depth, work.units, key_bytes, most, work.scores, scores_bytes)
    _weigh_rows(kind, job, work, row, num, key, most, lines)
    units = work.units + STEP_UNITS * 8
    feature = 0
    while feature < head_dim:
        offset, there = feature * size, lines + feature * 4
        if head_dim - feature >= FEATURES:
            sum_values_wide(
                *(kind, num, work.scores, scores_bytes, units, offset, value_bytes, most),
                *(there, work.line_bytes),
            )
            feature += FEATURES
        else:
            sum_values_one(
                *(kind, num, work.scores, scores_bytes, units, offset, value_bytes, most),
                *(there, work.line_bytes),
            )
            feature += REGISTER_LANES


@inlined
def _step_lines(job: Any, tile: Any, work: Any, step: int) -> int:
    """Where the lines of one step lie: in the job's lines if this is a part."""
    if tile.lines == WHOLE:
        return work.step_lines
    return job.lines + (((tile.lines + step) * job.num_kv + work.kv) * job.group) * work.line_bytes


@inlined
def _add_parts(job: Any, tile: Any, work: Any) -> bool:
    """Whether this part of its row was the last to be ready. Then the row's lines are added up."""
    num_steps = -(-work.length // KEYS)
    counter = job.counters + (tile.lines * job.num_kv + work.kv) * 8
    if add(counter, 1) + 1 < -(-num_steps // PART_STEPS):
        return False
    store_release(counter, 0)
    for step in range(num_steps):
        _fold_lines(work, 0, work.rows, _step_lines(job, tile, work, step))
    return True


@inlined
def _attend(kind: Any, args: int, chunk: int, thread: int) -> None:
    job = carray(pointer(args), 1, ATTEND)[0]
    index, kv = divmod(chunk, job.num_kv)
    tile = carray(pointer(job.tiles + index * TILE_BYTES), 1, TILE)[0]
    work = _work_of(kind, job, tile, kv, thread)
    is_part = tile.lines != WHOLE
    num_steps = -(-work.length // KEYS)
    if is_part:
        num_steps = min(num_steps, tile.first_step + PART_STEPS)
    _load_queries(kind, job, tile, work)
    _begin_lines(work)
    for step in range(tile.first_step, num_steps):
        key = step * KEYS
        lines = _step_lines(job, tile, work, step)
        _find_units(kind, job, work, key)
        for row in range(0, work.rows, ROWS):
            num = min(ROWS, work.rows - row)
            if work.position + (row + num - 1) // job.group < key:
                continue
            _attend_rows(kind, job, work, row, num, key, lines)
            if is_part:
                lines += num * work.line_bytes
            else:
                _fold_lines(work, row, num, lines)
    if not is_part or _add_parts(job, tile, work):
        _store_outputs(kind, job, tile, work)


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


@kernel
def attend_float32(args: int, chunk: int, thread: int) -> None:
    """`args` is an ATTEND; chunk i is kv head i % K of tile i // K."""
    _attend(FLOAT32, args, chunk, thread)


@kernel
def attend_bfloat16(args: int, chunk: int, thread: int) -> None:
    _attend(BFLOAT16, args, chunk, thread)


@kernel
def attend_float16(args: int, chunk: int, thread: int) -> None:
    _attend(FLOAT16, args, chunk, thread)


@kernel
def attend_pairs(args: int, chunk: int, thread: int) -> None:
    _attend(PAIR, args, chunk, thread)
