"""Between host arrays and the device, without making the host wait for what the device computes.

On CPU both are the same memory. On CUDA the host side is pinned, and copies to the device run
behind the host. Only `fetch` waits.
"""

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


class StagedArray:
    """int64 values, filled through `host`, in memory that every step uses again."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_host = device.type == "cpu"
        pinned = device.type == "cuda"
        self._source = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._target = self._source if on_host else torch.zeros_like(self._source, device=device)
        self.host: NDArray[np.int64] = self._source.numpy()

    def send(self, values: NDArray[np.int64]) -> Tensor:
        """The values on the device: a view that the next `send` overwrites."""
        size = values.size
        self.host[:size] = values.reshape(-1)
        if self._target is not self._source:
            self._target[:size].copy_(self._source[:size], non_blocking=True)
        return self._target[:size].view(values.shape)


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
