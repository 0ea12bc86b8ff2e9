"""How a group of two or more ranks moves tensors: the first backend that accepts a tensor does it.

All ranks of a group must pick the same backend, so `accepts` may look only at what is equal on all
of them: shape, type and device.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveBackend(Protocol):
    """One way to run collectives. Inputs are left as they are; results are new tensors."""

    name: str

    def accepts(self, x: Tensor) -> bool: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...

    def close(self) -> None: ...


class ProcessGroupBackend:
    """torch.distributed's own: gloo for CPU tensors, NCCL for CUDA ones. Borrows the group."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.name = str(dist.get_backend(group))
        self._group = group
        self._size = group.size()
        self._device_type = device_type

    def accepts(self, x: Tensor) -> bool:
        return x.device.type == self._device_type

    def all_reduce(self, x: Tensor) -> Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self._group)
        return result

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = x.new_empty(self._size, *x.shape)
        dist.all_gather(list(parts.unbind()), x.contiguous(), group=self._group)
        shape = list(x.shape)
        shape[dim] *= self._size
        return parts.movedim(0, dim % x.dim()).reshape(shape)

    def close(self) -> None:
        """The process group ends with its owner, `ReplicaGroups`."""


class Communicator:
    """The dispatch chain of one group; owns its backends."""

    def __init__(self, backends: list[CollectiveBackend]) -> None:
        self._backends = backends

    @property
    def names(self) -> list[str]:
        return [backend.name for backend in self._backends]

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._backend_for(x).all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._backend_for(x).all_gather(x, dim)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def _backend_for(self, x: Tensor) -> CollectiveBackend:
        for backend in self._backends:
            if backend.accepts(x):
                return backend
        raise ValueError(f"none of {self.names} accepts a tensor on {x.device}")
