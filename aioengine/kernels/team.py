"""Threads that work on kernels together.

**A job** is a kernel (see codegen.Kernel), the address of its arguments, and a number of chunks.
`Team.run` computes all chunks and returns: the caller works, and helpers take chunks, too. One job
runs at a time.

**Claiming.** The word `remaining` says how many chunks nobody has claimed. Whoever lowers it from
n > 0 to n - 1 (compare and swap) has claimed chunk `count - n`, and only then reads what the job
is. The job cannot end before its claimed chunks are counted in `done`, so what was read belongs to
the claim: a helper that was descheduled anywhere, for however long, does no harm, and one that
sleeps only helps less. The caller never waits for a helper that holds no chunk.

**Waiting.** A helper without work spins: with the pause instruction for PAUSE_NS, then offering the
processor to others (sched_yield) until AWAKE_NS. Then it sleeps in read(2) on an eventfd of its
own; `run` and `wake` write to the eventfds of those that sleep. So that none is missed, a helper
exchanges its `sleeping` flag and then looks at `remaining`, and the caller exchanges `remaining`
and then looks at the flags. The caller waits for chunks in flight in the same way, but never
sleeps.

With one thread there are no helpers, and `run` is a loop.
"""

import os
import threading
import weakref
from typing import Any, Final, Protocol

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.atomics import (
    add,
    exchange,
    load_acquire,
    load_in_order,
    relax,
    replace,
    store_release,
)
from aioengine.kernels.clock import now, sched_yield
from aioengine.kernels.codegen import I64, entry, inlined, pointer
from aioengine.kernels.programs import Op, Program

PAUSE_NS: Final = 20_000
AWAKE_NS: Final = 1_000_000
"""Longer than the gaps between the kernels of a step, and than most between steps."""

_LINE: Final = 128
"""Bytes between words that different threads write: processors fetch cache lines in pairs."""
_REMAINING, _DONE, _JOB, _STOP, _CLOCK, _HELPERS = (i * _LINE for i in range(6))
"""Offsets of the control words. At `_JOB` are three (the kernel's address, the arguments', the
number of chunks), at `_CLOCK` two of scratch for the caller, from `_HELPERS` on a line of each
helper."""
_ONE: Final = _STOP + 8
"""The constant that is written to eventfds."""
_SLEEPING, _EVENTFD, _SCRATCH = 0, 8, 16
"""Offsets in a helper's line. The scratch is for a timespec, or what is read from the eventfd."""
_JOIN_S: Final = 2.0
_PAUSES_PER_LOOK: Final = 32
"""At the clock, which costs as much as a pause."""

_read: Any = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write: Any = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


@intrinsic
def _call(typing: Any, address: Any, args: Any, chunk: Any, thread: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@inlined
def _words(address: int, count: int) -> Any:
    return carray(pointer(address), count, np.int64)


@inlined
def _work(control: int, thread: int) -> int:
    """Claims chunks and computes them until there are no more; how many it were."""
    job = _words(control + _JOB, 3)
    num_done = 0
    remaining = load_acquire(control + _REMAINING)
    while remaining > 0:
        if replace(control + _REMAINING, remaining, remaining - 1):
            _call(job[0], job[1], job[2] - remaining, thread)
            num_done += 1
        remaining = load_acquire(control + _REMAINING)
    if num_done:
        add(control + _DONE, num_done)
    return num_done


@entry
def _wake(control: int, num_helpers: int) -> None:
    """Writes to the eventfds of the helpers that sleep, once to each."""
    for helper in range(num_helpers):
        line = control + _HELPERS + helper * _LINE
        if load_in_order(line + _SLEEPING) and exchange(line + _SLEEPING, 0):
            _write(_words(line + _EVENTFD, 1)[0], control + _ONE, 8)


@entry
def _stop(control: int, num_helpers: int) -> None:
    exchange(control + _STOP, 1)
    _wake(control, num_helpers)


@entry
def _run(control: int, num_helpers: int, kernel: int, args: int, num_chunks: int) -> None:
    job = _words(control + _JOB, 3)
    job[0], job[1], job[2] = kernel, args, num_chunks
    store_release(control + _DONE, 0)
    exchange(control + _REMAINING, num_chunks)
    _wake(control, num_helpers)
    _work(control, 0)
    started = 0
    while load_acquire(control + _DONE) != num_chunks:
        if started == 0 or now(control + _CLOCK) - started < PAUSE_NS:
            for _ in range(_PAUSES_PER_LOOK):
                relax()
            started = started or now(control + _CLOCK)
        else:
            sched_yield()


@entry
def _run_alone(kernel: int, args: int, num_chunks: int) -> None:
    for chunk in range(num_chunks):
        _call(kernel, args, chunk, 0)


@inlined
def run_job(control: int, num_helpers: int, kernel: int, args: int, num_chunks: int) -> None:
    """`Team.run` for compiled functions, which get `Team.handle`."""
    if num_helpers and num_chunks > 1:
        _run(control, num_helpers, kernel, args, num_chunks)
    else:
        _run_alone(kernel, args, num_chunks)


@inlined
def _sleep(control: int, line: int) -> None:
    """Until woken. Returns at once when there is something to do."""
    exchange(line + _SLEEPING, 1)
    has_work = load_in_order(control + _REMAINING) > 0 or load_in_order(control + _STOP) != 0
    if has_work and exchange(line + _SLEEPING, 0):
        return
    # Who has lowered the flag writes; an interrupted read is repeated.
    while _read(_words(line + _EVENTFD, 1)[0], line + _SCRATCH, 8) != 8:
        pass


@entry
def _help(control: int, thread: int) -> None:
    """What a helper does, from its start to `close`."""
    line = control + _HELPERS + (thread - 1) * _LINE
    idle_since = now(line + _SCRATCH)
    while load_acquire(control + _STOP) == 0:
        if _work(control, thread):
            idle_since = now(line + _SCRATCH)
            continue
        idle = now(line + _SCRATCH) - idle_since
        if idle < PAUSE_NS:
            for _ in range(_PAUSES_PER_LOOK):
                if load_acquire(control + _REMAINING) > 0:
                    break
                relax()
        elif idle < AWAKE_NS:
            sched_yield()
        else:
            _sleep(control, line)
            idle_since = now(line + _SCRATCH)


def compile_or_load() -> None:
    """Takes a second where numba's cache has nothing yet."""
    for function, arity in ((_run, 5), (_run_alone, 3), (_wake, 2), (_help, 2), (_stop, 2)):
        function.compile((types.int64,) * arity)


# --- threads -------------------------------------------------------------------------------------


class Capture(Protocol):
    """Whoever notes what a team is called with, to repeat it."""

    def note(self, op: Op, *args: float) -> None: ...

    def refuse(self, reason: str) -> None:
        """Something cannot be repeated."""


class Team:
    """The calling thread and its helpers. `call`, `run` and `wake` belong to one thread at a time.

    Helpers are daemon threads and end with `close`, or with the interpreter at the latest. A team
    that is closed still runs jobs, by the caller alone.
    """

    def __init__(self, num_threads: int) -> None:
        assert num_threads > 0
        self.num_threads = num_threads
        self.capture: Capture | None = None
        self._num_helpers = num_threads - 1
        words, self._control = _aligned_words(_HELPERS + self._num_helpers * _LINE)
        self._words = words  # `run` may be called after `close`
        words[_ONE // 8] = 1
        compile_or_load()
        helpers = []
        for thread in range(1, num_threads):
            eventfd = os.eventfd(0, os.EFD_CLOEXEC)
            words[(_HELPERS + (thread - 1) * _LINE + _EVENTFD) // 8] = eventfd
            helper = threading.Thread(
                target=_run_helper,
                args=(words, thread),
                name=f"helper {thread}",
                daemon=True,
            )
            helpers.append((helper, eventfd))
        self._finalizer = weakref.finalize(self, _close, words, helpers)
        for helper, _ in helpers:
            helper.start()

    def call(self, op: Op, *args: float) -> None:
        """An op, which gets `handle` and whatever else among these numbers. What they are the
        addresses of must live for as long as a capture may be repeated."""
        op.run(*args)
        if self.capture is not None:
            self.capture.note(op, *args)

    def run(self, kernel: int, args: int, num_chunks: int) -> None:
        """Computes chunks 0 to `num_chunks` - 1 of the kernel at this address, without the GIL.
        Not within a capture: there is no op to be repeated."""
        if self.capture is not None:
            self.capture.refuse("a kernel runs that is no part of an op")
        if self._num_helpers and num_chunks > 1:
            _run(self._control, self._num_helpers, kernel, args, num_chunks)
        else:
            _run_alone(kernel, args, num_chunks)

    def new_program(self) -> Program:
        """An empty one. Its ops must be of a team that lives."""
        return Program()

    @property
    def handle(self) -> tuple[int, int]:
        """The first arguments of `run_job`, good as long as the team lives."""
        return self._control, self._num_helpers

    def wake(self) -> None:
        """To be called when work is about to come: to wake up takes longer than a kernel."""
        if self._num_helpers:
            _wake(self._control, self._num_helpers)

    def close(self) -> None:
        """Ends the helpers. Again: nothing."""
        self._finalizer()


def _aligned_words(num_bytes: int) -> tuple[Any, int]:
    """Zeros that begin with a line, and their address."""
    words = np.zeros((num_bytes + _LINE) // 8, np.int64)
    words = words[-words.ctypes.data % _LINE // 8 :]
    return words, words.ctypes.data


def _run_helper(words: Any, thread: int) -> None:
    _help(words.ctypes.data, thread)


def _close(words: Any, helpers: list[tuple[threading.Thread, int]]) -> None:
    _stop(words.ctypes.data, len(helpers))
    for helper, eventfd in helpers:
        helper.join(_JOIN_S)
        if not helper.is_alive():
            os.close(eventfd)
