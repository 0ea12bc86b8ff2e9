"""Memory of parameters."""

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_CHUNK_BYTES: Final = 64 * 2**20
_LINE_BYTES: Final = 64


class ParameterMemory:
    """Hands out a device's memory for parameters, uninitialised.

    On CPU tensors lie side by side in chunks of address space that ask for huge pages (2 MiB on
    x86-64): a step reads all weights once, and with pages of 4 KiB a third of the time goes into
    finding where those are. A chunk lives as long as any tensor in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if self.device.type != "cpu" or count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        num_bytes = count * dtype.itemsize
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            self._chunk = _huge_pages(max(num_bytes, _CHUNK_BYTES))
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        # Each has a storage of its own, for whoever saves one.
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=start)
        return tensor.view(tuple(shape))


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Zeros: a page becomes memory when it is first touched, and is of the usual size where the
    system has no others."""
    chunk = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
