"""The backends behind which torch.distributed's own process groups stand: gloo and NCCL.

They borrow the group, which ends with its `GroupCoordinator`.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from aioengine.dist.communicators import Capture, Operation

ONE_SHOT_BYTES: Final = 512 * 1024
"""Most bytes that a rank receives in one step of a gloo all_reduce; larger sums take two steps."""
DIRECT_BYTES: Final = 4 * 1024 * 1024
"""Most bytes that a rank receives in a direct gloo all_gather, which sends copies of its input."""

_HALF_TYPES: Final = frozenset({torch.float16, torch.bfloat16})
_SUM_TYPES: Final = _HALF_TYPES | {
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
}

# torch 2.13 renamed these two and warns of the old names, which are all that older versions have.
_all_gather_single: Final[Callable[..., Any]] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Final[Callable[..., Any]] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class GlooBackend:
    """CPU tensors over gloo. Sums are in float32 (integers and float64: in their own type) in rank
    order, rounded once: the same bits on every rank, in every run, and from every backend for CPU
    tensors.

    Sums of three ranks or more, and what is small, go through all_to_all, in which ranks exchange
    directly. gloo's ring waits for one neighbour after the other (4 ranks, 16 KiB, two cores: 5.0
    ms instead of 1.5) and rounds half types at every hop; two addends have only one order.
    """

    name = "gloo"
    capture: Capture | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = group.size()

    def accepts(self, operation: Operation, x: Tensor) -> bool:
        is_sum = operation in ("all_reduce", "reduce_scatter")
        return x.is_cpu and (not is_sum or x.dtype in _SUM_TYPES)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._size == 2:
            return _all_reduce(x, self._group)
        num_values = x.numel()
        if num_values * x.element_size() * self._size <= ONE_SHOT_BYTES:
            return _sum_in_rank_order(self._gather(x))
        missing = -num_values % self._size
        flat = functional.pad(x.reshape(-1), (0, missing)) if missing else x.reshape(-1)
        my_part = _sum_in_rank_order(self._exchange(flat.view(self._size, -1)))
        return self._gather(my_part).view(-1)[:num_values].view(x.shape)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return _join(self._gather(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return _sum_in_rank_order(self._exchange(_split(x, dim, self._size)))

    def broadcast(self, x: Tensor, source: int) -> None:
        _broadcast(x, source, self._group)

    def enter_job(self, seq: int) -> None:
        """A process group knows nothing of jobs."""

    def close(self) -> None:
        """Nothing of its own."""

    def _gather(self, x: Tensor) -> Tensor:
        """Every rank's x, as [rank, *x.shape]."""
        if x.numel() * x.element_size() * self._size > DIRECT_BYTES:
            rows = x.new_empty(self._size, *x.shape)
            dist.all_gather(
                [as_bytes(row) for row in rows], as_bytes(x.contiguous()), group=self._group
            )
            return rows
        return self._exchange(x.expand(self._size, *x.shape).contiguous())

    def _exchange(self, parts: Tensor) -> Tensor:
        """Sends contiguous parts[r] to rank r; [r] of the result is what rank r sent here."""
        received = torch.empty_like(parts)
        if parts.numel():
            dist.all_to_all_single(as_bytes(received), as_bytes(parts), group=self._group)
        return received


class NcclBackend:
    """CUDA tensors over NCCL, in the order of the current stream; nothing waits on the host."""

    name = "nccl"
    capture: Capture | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = group.size()

    def accepts(self, operation: Operation, x: Tensor) -> bool:
        is_sum = operation in ("all_reduce", "reduce_scatter")
        return x.is_cuda and (not is_sum or x.dtype in _SUM_TYPES)

    def all_reduce(self, x: Tensor) -> Tensor:
        return _all_reduce(x, self._group)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        gathered = x.new_empty(self._size, *x.shape)
        if x.numel():
            _all_gather_single(as_bytes(gathered), as_bytes(x.contiguous()), group=self._group)
        return _join(gathered, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        parts = _split(x, dim, self._size)
        result = torch.empty_like(parts[0])
        if x.numel():
            _reduce_scatter_single(result.view(-1), parts.view(-1), group=self._group)
        return result

    def broadcast(self, x: Tensor, source: int) -> None:
        _broadcast(x, source, self._group)

    def enter_job(self, seq: int) -> None:
        """A process group knows nothing of jobs."""

    def close(self) -> None:
        """Nothing of its own."""


def as_bytes(x: Tensor) -> Tensor:
    """Contiguous x as uint8 [bytes], sharing its memory. What only moves values moves bytes, so
    that it takes types which a library does not know."""
    return x.view(-1).view(torch.uint8)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        dist.all_reduce(total, group=group)
    return total


def _broadcast(x: Tensor, source: int, group: dist.ProcessGroup) -> None:
    if not x.numel():
        return
    dense = x.contiguous()
    dist.broadcast(as_bytes(dense), group=group, group_src=source)
    if dense is not x:
        x.copy_(dense)


def _split(x: Tensor, dim: int, num_parts: int) -> Tensor:
    """x cut along dim into contiguous [part, *shape of a part]."""
    before, size, after = x.shape[:dim], x.shape[dim] // num_parts, x.shape[dim + 1 :]
    return x.reshape(*before, num_parts, size, *after).movedim(dim, 0).contiguous()


def _join(parts: Tensor, dim: int) -> Tensor:
    """[part, *shape of a part] put together along dim."""
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _sum_in_rank_order(parts: Tensor) -> Tensor:
    """Over [rank, ...] of two ranks or more."""
    first = parts[0].float() if parts.dtype in _HALF_TYPES else parts[0]
    total = first + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(parts.dtype)
