"""all_reduce over torch symmetric memory: the GPUs of a host read each other's memory directly.

Written from torch 2.13's kernels (csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu): these
take float32 and bfloat16, whole 16-byte words, and end with a barrier on the device, so that the
staging buffer may be written again by the next operation of the stream.
"""

from collections.abc import Sequence
from typing import Final, NoReturn

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from aioengine.dist.communicators import Capture, Operation
from aioengine.dist.plain_values import all_gather_values

MAX_BYTES: Final = 1024 * 1024
"""Larger tensors are left to NCCL, which is made for bandwidth."""
ONE_SHOT_BYTES: Final = 128 * 1024
"""Up to here every rank reads and adds everything, beyond it a part and then the others' sums;
torch's own limit (`_inductor.config._collective.one_shot_all_reduce_threshold_bytes`)."""
WORD_BYTES: Final = 16
SIZES: Final = (2, 4, 8)
"""Ranks for which the kernels add in rank order. For other numbers each rank starts with itself,
so that ranks would get different sums."""

_DTYPES: Final = (torch.float32, torch.bfloat16)


class SymmetricMemoryBackend:
    """Sums of CUDA tensors of up to MAX_BYTES. Device work only: CUDA graphs may capture it."""

    name = "symm_mem"
    capture: Capture | None = None

    def __init__(self, buffer: Tensor, group_name: str) -> None:
        """`buffer`: uint8 [MAX_BYTES], mapped by every rank of the torch group `group_name`."""
        self._buffers = {dtype: buffer.view(dtype) for dtype in _DTYPES}
        self._group_name = group_name

    def accepts(self, operation: Operation, x: Tensor) -> bool:
        num_bytes = x.numel() * x.element_size()
        return (
            operation == "all_reduce"
            and x.is_cuda
            and x.dtype in _DTYPES
            and 0 < num_bytes <= MAX_BYTES
            and num_bytes % WORD_BYTES == 0
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        staged = self._buffers[x.dtype][: x.numel()]
        staged.view(x.shape).copy_(x)
        if x.numel() * x.element_size() <= ONE_SHOT_BYTES:
            total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(staged, "sum", self._group_name)
            return total.view(x.shape)
        total = torch.empty_like(staged)
        torch.ops.symm_mem.two_shot_all_reduce_out(staged, "sum", self._group_name, total)
        return total.view(x.shape)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._never("all_gather")

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._never("reduce_scatter")

    def broadcast(self, x: Tensor, source: int) -> None:
        self._never("broadcast")

    def enter_job(self, seq: int) -> None:
        """Ranks cannot see each other's jobs from the host."""

    def close(self) -> None:
        """Gives the buffer back; peers that still map it keep it alive for themselves."""
        self._buffers.clear()

    def _never(self, operation: Operation) -> NoReturn:
        raise AssertionError(f"{operation} was not accepted")


def open_symmetric_memory(
    device: torch.device, node: str, device_group: dist.ProcessGroup, cpu_group: dist.ProcessGroup
) -> SymmetricMemoryBackend | str:
    """The backend, or why there is none: the same on all ranks, which call it at the same time.

    `device` has an index; `node` is the launcher's name for the host.
    """
    places = [(node, index) for node, index in all_gather_values((node, device.index), cpu_group)]
    refusal = _agree(refuse_places(places) or _refuse_device(device, places), cpu_group)
    if refusal is not None:
        return refusal
    buffer, error = None, None
    try:
        buffer = symm_mem.empty(MAX_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as failure:
        error = f"no memory that peers can map ({failure})"
    refusal = _agree(error, cpu_group)
    if buffer is None or refusal is not None:
        return refusal or ""
    try:
        symm_mem.rendezvous(buffer, device_group.group_name)
    except RuntimeError as failure:
        error = f"memory of a peer cannot be mapped ({failure})"
    return _agree(error, cpu_group) or SymmetricMemoryBackend(buffer, device_group.group_name)


def refuse_places(places: Sequence[tuple[str, int]]) -> str | None:
    """What is in the way in the (node, device index) of the ranks; None when nothing is."""
    if len(places) not in SIZES:
        return f"{len(places)} ranks, and only for {SIZES} do the kernels add in rank order"
    if len({node for node, _ in places}) > 1:
        return "its ranks are on several nodes"
    if len(set(places)) < len(places):
        return "its ranks do not see each other's devices"
    return None


def _refuse_device(device: torch.device, places: Sequence[tuple[str, int]]) -> str | None:
    """What this rank finds in the way of its own device."""
    if (backend := symm_mem.get_backend(device)) != "CUDA":
        return f"torch's symmetric memory is {backend or 'not available'} here, not CUDA"
    for _, index in places:
        if index >= torch.cuda.device_count():
            return f"device {index} of a peer is not visible"
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"device {device.index} has no access to the memory of device {index}"
    return None


def _agree(refusal: str | None, cpu_group: dist.ProcessGroup) -> str | None:
    """The first refusal of any rank, on every rank."""
    for rank, other in enumerate(all_gather_values(refusal, cpu_group)):
        if other is not None:
            return f"{other} (rank {rank} of the group)"
    return None
