"""Collectives between the ranks of one host through memory that they share. Device thread only.

The memory is a memfd of the group's first rank: it has no name in any file system, so nothing is
left behind whoever is killed when. The other ranks open it as /proc/<pid>/fd/<n>, must find the
first rank's nonce in it, and answer in it with their own. All pages are allocated before anybody
maps them, so too little memory is a refusal at start and no SIGBUS later.
"""

import importlib
import math
import mmap
import os
import secrets
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from aioengine.dist.communicators import Capture, Operation
from aioengine.errors import DivergenceError, EngineError, RankLostError, StepTimeoutError

SLOT_BYTES: Final = 1 << 20
"""The most that one rank publishes at a time; a segment holds two slots per rank."""
ONE_PHASE_BYTES: Final = 1 << 15
"""Up to here everybody adds up everything: two ranks with a core each break even at 16 to 64 KiB,
four that share two cores at 64 KiB."""
AWAKE_ALONE_NS: Final = 250_000
"""A rank with a core of its own stays awake for so long while it waits: waking up takes 20 to 50
µs in a virtual machine, and ranks that sleep soon miss each other by turns."""
AWAKE_CROWDED_NS: Final = 30_000
"""Where ranks share cores. The others cannot run meanwhile: sched_yield(2) gives way only inside a
scheduling group, and a rank is often one by itself (its session)."""
NONCE_BYTES: Final = 16
_PAGE_BYTES: Final = 4096
"""Pages: the first has the nonce, the next ones the blocks of the ranks, then come the slots."""
_ANSWER_OFFSET: Final = _PAGE_BYTES // 2
"""Where in its block a rank puts its own nonce, so that all see that it shares the memory."""

_KERNELS: Final = "aioengine.dist.shm_kernels"
"""Imported by name, and only where memory is shared: it brings numba."""
_SUMMABLE: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_DTYPES: Final = (
    *_SUMMABLE,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""A type's place is its code in the kernels."""


class SharedMemoryBackend:
    """One rank's end of the memory of one group. Results are new tensors, contiguous.

    Any operation raises
    - DivergenceError when another rank is in a different operation, or in one of another job;
    - RankLostError within a second of the death of another rank, or when it closed its end;
    - StepTimeoutError when ranks have not arrived `timeout_s` after this one.
    After any of these the group is of no use: later operations raise the same kind.
    """

    name = "shm"

    def __init__(
        self,
        kernels: ModuleType,
        segment: mmap.mmap,
        pidfds: list[int],
        *,
        group: str,
        ranks: tuple[int, ...],
        rank_in_group: int,
        timeout_s: float,
        has_own_core: bool,
    ) -> None:
        """Takes over `segment` and `pidfds` (one per rank, -1 for this one)."""
        assert kernels.BLOCK_BYTES == _PAGE_BYTES
        self._kernels = kernels
        self._segment = segment
        self._pidfds = pidfds
        self._group = group
        self._ranks = ranks
        self._own = rank_in_group
        self._size = len(ranks)
        self._timeout_s = timeout_s
        pollfds = [(pidfd & 0xFFFFFFFF) | select.POLLIN << 32 for pidfd in pidfds]
        self._scratch = np.array([*pollfds, *[0] * (self._size + 2)], np.int64)
        base = np.frombuffer(segment, np.uint8).ctypes.data
        scratch = self._scratch.ctypes.data
        self._context = np.zeros(1, kernels.CONTEXT)
        for field, value in {
            "blocks": base + _block_offset(0),
            "slots": base + _block_offset(self._size),
            "slot_bytes": SLOT_BYTES,
            "one_phase_bytes": ONE_PHASE_BYTES,
            "rank": rank_in_group,
            "size": self._size,
            "timeout_ns": int(timeout_s * 1e9),
            "awake_ns": AWAKE_ALONE_NS if has_own_core else AWAKE_CROWDED_NS,
            "pidfds": scratch,
            "sources": scratch + 8 * self._size,
            "clock": scratch + 16 * self._size,
        }.items():
            self._context[field] = value
        self._address = self._context.ctypes.data
        self._end: tuple[type[EngineError], str] = (EngineError, "")
        """Why nothing goes through any more, with `ended` set in the context."""
        self.capture: Capture | None = None
        self._codes = {dtype: code << 8 for code, dtype in enumerate(_DTYPES)}
        self._sums = {
            dtype: (kernels.ALL_REDUCE | self._codes[dtype], dtype.itemsize) for dtype in _SUMMABLE
        }

    def enter_job(self, seq: int) -> None:
        """Ranks that are in different jobs are told apart by it, and named."""
        self._context["job"] = seq

    def accepts(self, operation: Operation, x: Tensor) -> bool:
        is_sum = operation in ("all_reduce", "reduce_scatter")
        return x.is_cpu and x.dtype in (self._sums if is_sum else self._codes)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Summed in rank order, in float32 for the floating types, rounded once."""
        x = x.contiguous()
        result = self._empty(x, x.shape)
        operation, item_bytes = self._sums[x.dtype]
        if num_bytes := x.numel() * item_bytes:
            self._run(operation, x, result, num_bytes, 0)
        return result

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        shape = list(x.shape)
        num_rows = math.prod(shape[:dim])
        shape[dim] *= self._size
        result = self._empty(x, shape)
        if num_bytes := x.numel() * x.itemsize:
            operation = self._kernels.ALL_GATHER | self._codes[x.dtype] | dim << 16
            self._run(operation, x, result, num_bytes, num_bytes // num_rows)
        return result

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum (as in `all_reduce`) along `dim`, which the size divides."""
        x = x.contiguous()
        shape = list(x.shape)
        num_rows = math.prod(shape[:dim])
        shape[dim] //= self._size
        result = self._empty(x, shape)
        if num_bytes := result.numel() * x.itemsize:
            operation = self._kernels.REDUCE_SCATTER | self._codes[x.dtype] | dim << 16
            self._run(operation, x, result, num_bytes, num_bytes // num_rows)
        return result

    def broadcast(self, x: Tensor, source: int) -> None:
        y = x.contiguous()
        if num_bytes := y.numel() * y.itemsize:
            operation = self._kernels.BROADCAST | self._codes[y.dtype] | source << 16
            self._run(operation, y, y, num_bytes, 0)
            if y is not x and source != self._own:
                x.copy_(y)

    def close(self) -> None:
        """Lets go of the memory. Ranks that wait for this one, now or later, raise RankLostError."""
        if self._segment.closed:
            return
        self._kernels.run(self._address, self._kernels.CLOSE, 0, 0, 0, 0)
        self._context["ended"], self._end = 1, (EngineError, "is closed")
        self._segment.close()
        _close_all(self._pidfds)

    def _run(self, operation: int, x: Tensor, result: Tensor, num_bytes: int, row: int) -> None:
        args = (self._address, operation, x.data_ptr(), result.data_ptr(), num_bytes, row)
        if status := self._kernels.run(*args):
            self._fail(status)
        if self.capture is not None:
            self.capture.note_call(self._kernels.run, args, self._fail)

    def _empty(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """For a result."""
        if self.capture is not None:
            return self.capture.empty(shape, x.dtype)
        return x.new_empty(shape)

    def _fail(self, status: int) -> None:
        """Raise what a status other than DONE means, now and from now on."""
        if status == self._kernels.ENDED:
            kind, how = self._end
            raise kind(f"shared memory of group {self._group!r} {how}")
        error = self._error(status)
        self._context["ended"], self._end = 1, (type(error), f"failed before: {error}")
        raise error

    def _error(self, status: int) -> EngineError:
        """What a status other than DONE means; `status` may have a rank that is to blame."""
        kernels, context = self._kernels, self._context[0]
        mine = self._line(self._own)
        here = f"rank {self._ranks[self._own]} is in {self._describe(mine)}"
        where = f"group {self._group!r} [ranks {', '.join(map(str, self._ranks))}]"
        if status == kernels.LATE:
            late = [
                str(rank)
                for place, rank in enumerate(self._ranks)
                if self._line(place)["tick"] != context["tick"]
            ]
            return StepTimeoutError(
                f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} of {where} did not arrive "
                f"within {self._timeout_s:g} s (--distributed-timeout-seconds): {here}"
            )
        culprit = int(context["culprit"])
        if status == kernels.MISMATCH:
            there = f"rank {self._ranks[culprit]} is in {self._describe(self._line(culprit))}"
            return DivergenceError(f"the ranks of {where} have diverged: {there}, {here}")
        what = "died" if status == kernels.DEAD else "closed the group"
        return RankLostError(f"rank {self._ranks[culprit]} {what} while {here} of {where}")

    def _line(self, place: int) -> Any:
        """What the rank at `place` in the group shows for the current tick, as a copy."""
        kernels, parity = self._kernels, int(self._context["tick"][0]) & 1
        offset = _block_offset(place) + parity * kernels.LINE_BYTES
        return np.frombuffer(self._segment, kernels.LINE, 1, offset)[0].copy()

    def _describe(self, line: Any) -> str:
        kernels, operation, num_bytes = self._kernels, int(line["operation"]), line["num_bytes"]
        kind, dtype, place = operation & 255, operation >> 8 & 255, operation >> 16
        name, detail = {
            kernels.ALL_REDUCE: ("all_reduce", ""),
            kernels.ALL_GATHER: ("all_gather", f" along dim {place}"),
            kernels.REDUCE_SCATTER: ("reduce_scatter", f" along dim {place}"),
            kernels.BROADCAST: ("broadcast", f" from rank {self._ranks[place % self._size]}"),
        }[kind]
        if kind == kernels.REDUCE_SCATTER:
            num_bytes *= self._size  # shown are those of the result
        type_name = str(_DTYPES[dtype]).removeprefix("torch.")
        return f"{name} of {num_bytes} B {type_name}{detail} at job {line['job']}"


# --- agreement -----------------------------------------------------------------------------------


class _Place(msgspec.Struct, frozen=True):
    """Where a rank runs: `node` is the launcher's word for it, the rest the kernel's."""

    node: str
    boot_id: str
    pid_namespace: str
    pid: int
    nonce: bytes
    cores: frozenset[int]
    """On which it may run."""


class _RefusedError(Exception):
    """Why the ranks of a group do not share memory."""


class _Joining:
    """One rank's steps towards a shared segment. What a step returns is told to all ranks."""

    def __init__(self, node: str, own: int, size: int) -> None:
        self._node = node
        self._own = own
        self._num_bytes = _segment_bytes(size)
        self._memfd = -1
        self.segment: mmap.mmap | None = None
        self.pidfds: list[int] = []

    def place(self) -> _Place:
        return _Place(
            self._node,
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
            os.getpid(),
            secrets.token_bytes(NONCE_BYTES),
            frozenset(os.sched_getaffinity(0)),
        )

    def load_kernels(self) -> None:
        """The first rank compiles them, if it must; the others then find them in numba's cache."""
        kernels = importlib.import_module(_KERNELS)
        if self._own == 0:
            kernels.compile_or_load()

    def offer(self, nonce: bytes) -> int:
        """The first rank's descriptor of the memory, all of it allocated; -1 on the others."""
        if self._own != 0:
            return -1
        self._memfd = os.memfd_create("aioengine", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._memfd, 0, self._num_bytes)
        except OSError as error:
            raise _RefusedError(f"cannot reserve {self._num_bytes} B of memory ({error})") from None
        os.pwrite(self._memfd, nonce, 0)
        return self._memfd

    def accept(self, places: list[_Place], memfd: int) -> None:
        """Maps the first rank's memory, checks its nonce and answers with the own one."""
        importlib.import_module(_KERNELS).compile_or_load()
        for index, place in enumerate(places):
            self.pidfds.append(-1 if index == self._own else os.pidfd_open(place.pid))
        path = f"/proc/{places[0].pid}/fd/{memfd}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size == self._num_bytes:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self.segment = mmap.mmap(descriptor, self._num_bytes, flags)
        finally:
            os.close(descriptor)
        if self.segment is None or self.segment[:NONCE_BYTES] != places[0].nonce:
            raise _RefusedError(f"{path} is not the memory that the group's first rank offers")
        answer = _block_offset(self._own) + _ANSWER_OFFSET
        self.segment[answer : answer + NONCE_BYTES] = places[self._own].nonce

    def check_answers(self, places: list[_Place]) -> None:
        assert self.segment is not None
        for index, place in enumerate(places):
            answer = _block_offset(index) + _ANSWER_OFFSET
            if self.segment[answer : answer + NONCE_BYTES] != place.nonce:
                raise _RefusedError(f"no answer of process {place.pid} is in the shared memory")

    def withdraw_offer(self) -> None:
        """The memory lives on where it is mapped."""
        if self._memfd >= 0:
            os.close(self._memfd)

    def abandon(self) -> None:
        if self.segment is not None:
            self.segment.close()
        _close_all(self.pidfds)


def open_shared_memory(
    cpu_group: dist.ProcessGroup,
    *,
    group: str,
    ranks: tuple[int, ...],
    rank: int,
    node: str,
    num_local_ranks: int,
    timeout_s: float,
) -> SharedMemoryBackend | str:
    """The backend, or the reason why there is none: alike on all ranks, which call it together.

    `ranks` are those of the group, `rank` is this one, `node` the launcher's name for its node,
    on which there are `num_local_ranks`, those of other groups included.
    `timeout_s` bounds each later operation. Raises what gloo raises when a rank does not take part.
    """
    own = ranks.index(rank)
    joining = _Joining(node, own, len(ranks))

    def share(step: Callable[[], object]) -> list[Any]:
        return _share(cpu_group, ranks, step)

    try:
        places = [msgspec.convert(place, _Place) for place in share(joining.place)]
        _check_places(places, ranks)
        share(joining.load_kernels)
        memfd = share(lambda: joining.offer(places[0].nonce))[0]
        share(lambda: joining.accept(places, memfd))
        share(lambda: joining.check_answers(places))
    except BaseException as error:
        joining.abandon()
        if isinstance(error, _RefusedError):
            return str(error)
        raise
    finally:
        joining.withdraw_offer()
    assert joining.segment is not None
    return SharedMemoryBackend(
        importlib.import_module(_KERNELS),
        joining.segment,
        joining.pidfds,
        group=group,
        ranks=ranks,
        rank_in_group=own,
        timeout_s=timeout_s,
        has_own_core=_has_own_core(places, own, num_local_ranks),
    )


def _has_own_core(places: list[_Place], own: int, num_local_ranks: int) -> bool:
    """Whether this rank need not share a core: it is kept apart from the others of its group, or
    there are enough for all ranks of the node."""
    mine = places[own].cores
    others = [place.cores for index, place in enumerate(places) if index != own]
    return all(mine.isdisjoint(cores) for cores in others) or len(mine) >= num_local_ranks


def _check_places(places: list[_Place], ranks: tuple[int, ...]) -> None:
    first = places[0]
    for rank, place in zip(ranks, places, strict=True):
        if place.node != first.node:
            what = f"node {first.node} and rank {rank} on node {place.node}"
        elif place.boot_id != first.boot_id:
            what = f"one host and rank {rank} on another"
        elif place.pid_namespace != first.pid_namespace:
            what = f"{first.pid_namespace} and rank {rank} in {place.pid_namespace}"
        else:
            continue
        raise _RefusedError(f"rank {ranks[0]} is on {what}")


def _share(
    group: dist.ProcessGroup, ranks: tuple[int, ...], step: Callable[[], object]
) -> list[Any]:
    """What `step` returns on every rank; _RefusedError on all of them when it raises on any."""
    problem, value = "", None
    try:
        value = step()
    except _RefusedError as refused:
        problem = str(refused)
    except Exception as error:  # numba raises what it likes, and the other ranks must hear of it
        problem = f"{type(error).__name__}: {error}"
    answers = [
        msgspec.msgpack.decode(data, type=tuple[str, Any])
        for data in _exchange(group, msgspec.msgpack.encode((problem, value)))
    ]
    for rank, (problem, _) in zip(ranks, answers, strict=True):
        if problem:
            raise _RefusedError(f"rank {rank}: {problem}")
    return [value for _, value in answers]


def _exchange(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """The bytes of every rank of the group, in order."""
    lengths = torch.empty(group.size(), 1, dtype=torch.int64)
    dist.all_gather(list(lengths), torch.tensor([len(data)]), group=group)
    padded = torch.frombuffer(bytearray(data.ljust(int(lengths.max()))), dtype=torch.uint8)
    parts = torch.empty(group.size(), len(padded), dtype=torch.uint8)
    dist.all_gather(list(parts), padded, group=group)
    return [bytes(part[:length].tolist()) for part, length in zip(parts, lengths, strict=True)]


def _block_offset(index: int) -> int:
    return _PAGE_BYTES * (1 + index)


def _segment_bytes(size: int) -> int:
    return _block_offset(size) + 2 * size * SLOT_BYTES


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
