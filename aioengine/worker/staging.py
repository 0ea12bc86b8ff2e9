"""Between host arrays and the device, without making the host wait for what the device computes.

On CPU both are the same memory. On CUDA the host side is pinned, and copies to the device run
behind the host. Only `fetch` waits.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device. The caller leaves the array as it is."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # torch reuses this memory once its copies are done
    return tensor.to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device on the host: one wait, for everything queued on the device so far."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors and tensors[0].is_cuda:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
        done.record()
        done.synchronize()
    return copies


class StagedView:
    """The first values of a StagedArray: filled through `host`, then pushed."""

    __slots__ = ("_source", "host", "tensor")

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.host: NDArray[np.int64] = source.numpy()
        self.tensor = target
        """The values on the device, once they are pushed."""
        self._source = None if target is source else source

    def push(self) -> None:
        """What `host` has now is what the device sees. Nothing to do on CPU."""
        if self._source is not None:
            self.tensor.copy_(self._source, non_blocking=True)


class StagedArray:
    """int64 values in memory that every step uses again."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_host = device.type == "cpu"
        pinned = device.type == "cuda"
        self._source = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._target = self._source if on_host else torch.zeros_like(self._source, device=device)

    def view(self, *shape: int) -> StagedView:
        """The first values, to be filled; whoever asks again gets the same memory."""
        size = math.prod(shape)
        source = self._source[:size].view(shape)
        if self._target is self._source:
            return StagedView(source, source)
        return StagedView(source, self._target[:size].view(shape))

    def send(self, values: NDArray[np.int64]) -> Tensor:
        """The values on the device: a view that the next `send` overwrites."""
        view = self.view(*values.shape)
        view.host[...] = values
        view.push()
        return view.tensor


class CopyFence:
    """Keeps the host from overwriting what the device has yet to read. Nothing to do on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub

    def wait(self) -> None:
        """Before a step is staged."""
        if self._event is not None:
            self._event.synchronize()

    def record(self) -> None:
        """After a step was staged."""
        if self._event is not None:
            self._event.record()


class StagedInputs:
    """Room for the inputs of one step, whatever it computes. `fence.wait()` before any of it is
    filled, `fence.record()` after all of it was."""

    def __init__(
        self, num_slots: int, max_num_tokens: int, max_num_blocks: int, device: torch.device
    ) -> None:
        self.fence = CopyFence(device)
        self.token_ids_T = StagedArray(max_num_tokens, device)
        self.positions_T = StagedArray(max_num_tokens, device)
        self.slot_mapping_T = StagedArray(max_num_tokens, device)
        self.block_table_RB = StagedArray(num_slots * max_num_blocks, device)
        self.context_lens_R = StagedArray(num_slots, device)
        self.slots_R = StagedArray(num_slots, device)
        """Of the rows that sample."""
        self.sample_rows_S = StagedArray(num_slots, device)
        self.prev_tokens = StagedArray(num_slots, device)
        self.prev_slots = StagedArray(num_slots, device)
