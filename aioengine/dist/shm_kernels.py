"""Compiled collectives over memory that the ranks of one host share. Needs numba.

`run` is the one entry point. It works without the interpreter lock, on addresses: of a private
record (CONTEXT) that describes the segment, and of the caller's tensors.

**Segment.** A block of BLOCK_BYTES per rank, then two slots per rank; a rank writes to its own
only. A block holds two lines (LINE), one per parity of the tick, and apart from them a closed flag.

**Ticks.** Every step of an operation (a chunk of a one-phase operation, half a chunk of a two-phase
one) is a tick, counted by each rank for itself: it fills its slot, writes its line, stores the tick
in it (release), waits until the line of every other rank shows the same tick (acquire), and reads.
Every operation waits for everybody, a broadcast too, on which the next two paragraphs rest.

**Why two slots are enough.** A rank that fills its slot for chunk c + 2 has passed a wait of chunk
c + 1, so every other rank has stored a tick of chunk c + 1, which it does only after its last read
of chunk c (a release orders earlier reads before the store). So nobody reads what is overwritten.

**Why two lines are enough.** Line t + 2 is written after everybody showed t + 1, hence after
everybody saw, and compared, line t. So a waiting rank sees tick t or an older one, never a newer,
and what a line says is stable while it is compared.

**Two phases.** With one phase every rank reads everything: (ranks - 1) × bytes. With two, each adds
up its own part of the chunk, stores the sum in that part of its own slot (where nobody else has
read), and after another tick everybody collects the parts.

**Sums** are taken in rank order, in float32 for the floating types, rounded once. All ranks add the
same numbers in the same order with the same instructions: results are equal bit by bit.

**Waiting.** First the pause instruction, then the processor is offered to others, then short sleeps
in ppoll(2) on a pidfd of every other rank, which end at once when one of them dies. After the pauses
a rank also looks for closed peers, at the time limit, and at what those who are there are in.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from aioengine.kernels.atomics import load_acquire, relax, store_release
from aioengine.kernels.clock import now, sched_yield
from aioengine.kernels.codegen import (
    F16,
    F32,
    I16,
    I32,
    I64,
    entry,
    inlined,
    narrowed,
    pointer,
    widened,
)

LINE: Final = np.dtype(
    [("tick", np.int64), ("operation", np.int64), ("num_bytes", np.int64), ("job", np.int64)]
)
"""What a rank is in. `operation` is kind | dtype << 8 | dim or source << 16."""
LINE_BYTES: Final = 128  # processors fetch cache lines in pairs
CLOSED_OFFSET: Final = 2 * LINE_BYTES
BLOCK_BYTES: Final = 4096

CONTEXT: Final = np.dtype(
    [
        ("blocks", np.int64),  # address of the rank blocks
        ("slots", np.int64),  # address of the slots
        ("slot_bytes", np.int64),
        ("one_phase_bytes", np.int64),  # largest all_reduce in one phase
        ("rank", np.int64),  # in the group, as are all ranks here
        ("size", np.int64),
        ("timeout_ns", np.int64),
        ("awake_ns", np.int64),  # how long a waiting rank stays awake
        ("pidfds", np.int64),  # address of a pollfd per rank, the own one with fd -1
        ("sources", np.int64),  # address of `size` words of scratch
        ("clock", np.int64),  # address of a timespec
        ("tick", np.int64),
        ("chunk", np.int64),  # counts chunks: which of the two slots is next
        ("job", np.int64),
        ("operation", np.int64),  # as in LINE, of the call in progress
        ("num_bytes", np.int64),
        ("culprit", np.int64),  # the rank that a status other than DONE is about
        ("ended", np.int64),  # nothing goes through any more
    ]
)

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, CLOSE = range(1, 6)
"""Kinds of operations."""
FLOAT32, BFLOAT16, FLOAT16, INT32, INT64 = range(5)
"""Codes of the types that can be added up."""
DONE, MISMATCH, DEAD, CLOSED, LATE, ENDED, _WAITING = range(7)
"""What `run` returns; _WAITING does not leave this file."""

VECTOR: Final = 32
"""Elements added up at a time: two registers of AVX-512, eight of NEON."""
_PART_ALIGNMENT: Final = 128
_PAUSES: Final = 50  # 1 µs
_MIN_SLEEP_NS: Final = 5_000
_MAX_SLEEP_NS: Final = 1_000_000
_PR_SET_TIMERSLACK: Final = 29

_TYPES: Final = {  # in memory, when added up, and bytes of an element
    FLOAT32: (F32, F32, 4),
    BFLOAT16: (I16, F32, 2),
    FLOAT16: (F16, F32, 2),
    INT32: (I32, I32, 4),
    INT64: (I64, I64, 8),
}
_ppoll: Any = types.ExternalFunction("ppoll", types.int32(*(types.int64,) * 4))
_prctl: Any = types.ExternalFunction("prctl", types.int32(types.int32, types.int64))
_memcpy: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))


# --- sums ----------------------------------------------------------------------------------------


def _add_up(
    builder: Any, dtype: int, count: int, sources: Any, size: Any, offset: Any, result: Any
) -> None:
    """`count` elements at `offset` from each of the `size` addresses at `sources`, in one vector.

    Written as vectors because LLVM needs seconds to find them in loops over scalars.
    """
    in_memory, added_as, align = _TYPES[dtype]
    is_float = added_as == F32
    vector = ir.VectorType(in_memory, count).as_pointer()
    table = builder.inttoptr(sources, I64.as_pointer())
    add = builder.fadd if is_float else builder.add

    def load(rank: Any) -> Any:
        address = builder.add(builder.load(builder.gep(table, [rank])), offset)
        stored = builder.load(builder.inttoptr(address, vector), align=align)
        return widened(builder, stored) if is_float else stored

    sums = cgutils.alloca_once_value(builder, load(I64(0)))
    with cgutils.for_range(builder, size, start=I64(1)) as ranks:
        builder.store(add(builder.load(sums), load(ranks.index)), sums)
    total = builder.load(sums)
    if is_float:
        total = narrowed(builder, total, in_memory)
    builder.store(total, builder.inttoptr(builder.add(result, offset), vector), align=align)


@intrinsic(prefer_literal=True)
def _sum_of(typing: Any, dtype: Any, sources: Any, size: Any, result: Any, num_bytes: Any) -> Any:
    """`num_bytes` of the type `dtype` (a literal) at `size` addresses, added up at `result`."""
    vector_bytes = VECTOR * _TYPES[dtype.literal_value][2]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, sources, size, result, num_bytes = args
        in_vectors = builder.and_(num_bytes, I64(-vector_bytes))
        for count, start, stop in ((VECTOR, I64(0), in_vectors), (1, in_vectors, num_bytes)):
            step = I64(vector_bytes // VECTOR * count)
            with cgutils.for_range_slice(builder, start, stop, step, I64) as (offset, _):
                _add_up(builder, dtype.literal_value, count, sources, size, offset, result)
        return context.get_dummy_value()

    return types.void(dtype, *(types.int64,) * 4), generate


@inlined
def _sum(context: Any, result: int, num_bytes: int) -> None:
    """Adds up `num_bytes` at the addresses in `sources`, one per rank, in rank order."""
    dtype = context.operation >> 8 & 255
    if dtype == FLOAT32:
        _sum_of(FLOAT32, context.sources, context.size, result, num_bytes)
    elif dtype == BFLOAT16:
        _sum_of(BFLOAT16, context.sources, context.size, result, num_bytes)
    elif dtype == FLOAT16:
        _sum_of(FLOAT16, context.sources, context.size, result, num_bytes)
    elif dtype == INT32:
        _sum_of(INT32, context.sources, context.size, result, num_bytes)
    else:
        _sum_of(INT64, context.sources, context.size, result, num_bytes)


# --- ticks ---------------------------------------------------------------------------------------


@inlined
def _line(context: Any, rank: int, tick: int) -> int:
    """Address."""
    return context.blocks + rank * BLOCK_BYTES + (tick & 1) * LINE_BYTES


@inlined
def _slot(context: Any, rank: int) -> int:
    """Address of a rank's slot for the current chunk."""
    return context.slots + (2 * rank + (context.chunk & 1)) * context.slot_bytes


@inlined
def _differs(context: Any, rank: int, tick: int) -> bool:
    """Whether a rank that shows this tick is in another operation than we are; the culprit then."""
    mine = carray(pointer(_line(context, context.rank, tick)), 1, LINE)[0]
    theirs = carray(pointer(_line(context, rank, tick)), 1, LINE)[0]
    context.culprit = rank
    return (
        mine.operation != theirs.operation
        or mine.num_bytes != theirs.num_bytes
        or mine.job != theirs.job
    )


@inlined
def _look_around(context: Any, tick: int) -> int:
    """_WAITING, DONE when everybody has arrived, or what is wrong with which rank."""
    is_waiting = False
    for rank in range(context.size):
        pollfd = carray(pointer(context.pidfds), context.size, np.int64)[rank]
        is_dead = (pollfd >> 48) & 0xFFFF != 0  # revents
        is_closed = load_acquire(context.blocks + rank * BLOCK_BYTES + CLOSED_OFFSET) != 0
        # Read last: a rank may arrive and then close or die, and the operation can still complete.
        if load_acquire(_line(context, rank, tick)) == tick:
            if _differs(context, rank, tick):
                return MISMATCH
        elif is_dead or is_closed:
            context.culprit = rank
            return DEAD if is_dead else CLOSED
        else:
            is_waiting = True
    return _WAITING if is_waiting else DONE


@inlined
def _wait_for_all(context: Any, tick: int) -> int:
    """The slow part of waiting: the processor is offered for `awake_ns`, then this sleeps, for an
    eighth of the time waited."""
    started, waited = now(context.clock), 0
    _prctl(_PR_SET_TIMERSLACK, 1)  # this thread's; without it a sleep takes 50 µs more
    while True:
        if waited < context.awake_ns:
            sched_yield()
        else:
            timespec = carray(pointer(context.clock), 2, np.int64)
            timespec[0] = 0
            timespec[1] = min(max(waited // 8, _MIN_SLEEP_NS), _MAX_SLEEP_NS)
            _ppoll(context.pidfds, context.size, context.clock, 0)
        status = _look_around(context, tick)
        if status != _WAITING:
            return status
        waited = now(context.clock) - started
        if waited > context.timeout_ns:
            return LATE


@inlined
def _meet(context: Any) -> int:
    """One tick: publish what was written, wait for everybody, compare what they are in."""
    tick = context.tick + 1
    context.tick = tick
    mine = carray(pointer(_line(context, context.rank, tick)), 1, LINE)[0]
    mine.operation = context.operation
    mine.num_bytes = context.num_bytes
    mine.job = context.job
    store_release(_line(context, context.rank, tick), tick)
    pauses = 0
    for rank in range(context.size):
        while load_acquire(_line(context, rank, tick)) != tick:
            if pauses == _PAUSES:
                return _wait_for_all(context, tick)
            relax()
            pauses += 1
        if _differs(context, rank, tick):
            return MISMATCH
    return DONE


# --- operations ----------------------------------------------------------------------------------


@inlined
def _set_sources(context: Any, offset: int, own: int) -> None:
    """What `_sum` adds up: `offset` in everybody's slot, and `own` for this rank."""
    sources = carray(pointer(context.sources), context.size, np.int64)
    for rank in range(context.size):
        sources[rank] = _slot(context, rank) + offset
    sources[context.rank] = own


@inlined
def _reduce_in_two_phases(context: Any, x: int, result: int, num_bytes: int) -> int:
    slot = _slot(context, context.rank)
    part = -(-num_bytes // (context.size * _PART_ALIGNMENT)) * _PART_ALIGNMENT
    start = min(context.rank * part, num_bytes)
    end = min(start + part, num_bytes)
    _memcpy(slot, x, start)
    _memcpy(slot + end, x + end, num_bytes - end)
    status = _meet(context)
    if status != DONE:
        return status
    _set_sources(context, start, x + start)
    _sum(context, result + start, end - start)
    _memcpy(slot + start, result + start, end - start)
    status = _meet(context)
    if status != DONE:
        return status
    for rank in range(context.size):
        start = min(rank * part, num_bytes)
        if rank != context.rank:
            _memcpy(result + start, _slot(context, rank) + start, min(part, num_bytes - start))
    return DONE


@inlined
def _all_reduce(context: Any, x: int, result: int, num_bytes: int) -> int:
    for offset in range(0, num_bytes, context.slot_bytes):
        chunk = min(context.slot_bytes, num_bytes - offset)
        context.chunk += 1
        if chunk > context.one_phase_bytes:
            status = _reduce_in_two_phases(context, x + offset, result + offset, chunk)
        else:
            _memcpy(_slot(context, context.rank), x + offset, chunk)
            status = _meet(context)
            if status == DONE:
                _set_sources(context, 0, x + offset)
                _sum(context, result + offset, chunk)
        if status != DONE:
            return status
    return DONE


@inlined
def _copy_rows(
    context: Any, rows: int, flat: int, rank: int, start: int, end: int, row_bytes: int, pack: bool
) -> None:
    """Copies bytes [start, end) of one rank's share of `rows` to `flat` (pack), or back.

    `rows` holds, for each row, the `row_bytes` of rank 0, then those of rank 1, and so on.
    """
    position = start
    while position < end:
        row, inside = position // row_bytes, position % row_bytes
        piece = min(row_bytes - inside, end - position)
        place = rows + (row * context.size + rank) * row_bytes + inside
        if pack:
            _memcpy(flat + position - start, place, piece)
        else:
            _memcpy(place, flat + position - start, piece)
        position += piece


@inlined
def _all_gather(context: Any, x: int, result: int, num_bytes: int, row_bytes: int) -> int:
    for start in range(0, num_bytes, context.slot_bytes):
        end = min(start + context.slot_bytes, num_bytes)
        context.chunk += 1
        _memcpy(_slot(context, context.rank), x + start, end - start)
        status = _meet(context)
        if status != DONE:
            return status
        for rank in range(context.size):
            flat = x + start if rank == context.rank else _slot(context, rank)
            _copy_rows(context, result, flat, rank, start, end, row_bytes, False)
    return DONE


@inlined
def _reduce_scatter(context: Any, x: int, result: int, num_bytes: int, row_bytes: int) -> int:
    """`num_bytes` and `row_bytes` are those of the result."""
    share = context.slot_bytes // (context.size * _PART_ALIGNMENT) * _PART_ALIGNMENT
    for start in range(0, num_bytes, share):
        end = min(start + share, num_bytes)
        context.chunk += 1
        slot = _slot(context, context.rank)
        for rank in range(context.size):
            flat = slot + rank * (end - start)
            _copy_rows(context, x, flat, rank, start, end, row_bytes, True)
        status = _meet(context)
        if status != DONE:
            return status
        offset = context.rank * (end - start)
        _set_sources(context, offset, slot + offset)
        _sum(context, result + start, end - start)
    return DONE


@inlined
def _broadcast(context: Any, x: int, num_bytes: int) -> int:
    source = context.operation >> 16
    for start in range(0, num_bytes, context.slot_bytes):
        length = min(context.slot_bytes, num_bytes - start)
        context.chunk += 1
        if context.rank == source:
            _memcpy(_slot(context, source), x + start, length)
        status = _meet(context)
        if status != DONE:
            return status
        if context.rank != source:
            _memcpy(x + start, _slot(context, source), length)
    return DONE


@entry
def run(
    context_address: int, operation: int, x: int, result: int, num_bytes: int, row_bytes: int
) -> int:
    """One collective; returns DONE, or what is wrong with the rank `culprit` (LATE: no rank).

    After anything but DONE the ranks no longer agree on the tick: only CLOSE may follow.
    """
    context = carray(pointer(context_address), 1, CONTEXT)[0]
    if context.ended:
        return ENDED
    context.operation = operation
    context.num_bytes = num_bytes
    kind = operation & 255
    if kind == ALL_REDUCE:
        return _all_reduce(context, x, result, num_bytes)
    if kind == ALL_GATHER:
        return _all_gather(context, x, result, num_bytes, row_bytes)
    if kind == REDUCE_SCATTER:
        return _reduce_scatter(context, x, result, num_bytes, row_bytes)
    if kind == BROADCAST:
        return _broadcast(context, x, num_bytes)
    store_release(context.blocks + context.rank * BLOCK_BYTES + CLOSED_OFFSET, 1)
    return DONE


def compile_or_load() -> None:
    """Loads `run` from numba's cache, or compiles it, which takes seconds."""
    run.compile((types.int64,) * 6)
