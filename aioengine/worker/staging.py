"""Host arrays and the device tensors they are sent to, reused by every step.

On CPU both are the same memory. On CUDA the host side is pinned and copies run behind the host, so
it may be overwritten only when the last step's copies are done.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class StagedArray:
    """int64 values, filled through `host`."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type != "cpu"
        self._source = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._target = torch.zeros_like(self._source, device=device) if pinned else self._source
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
