"""How a group of two or more ranks moves tensors: the first backend that accepts a tensor does it.

All ranks of a group must pick the same backend, so `accepts` may look only at what is equal on all
of them: shape, type and device.
"""

from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


class CollectiveBackend(Protocol):
    """One way to run collectives in one group of two or more ranks.

    Inputs are left as they are and results are new tensors, but for `broadcast`. Callers have
    checked that `dim` is a dimension of x, 0 or more, which the group's size divides in
    `reduce_scatter`, and that the backend accepts x for this operation.
    """

    name: str

    def accepts(self, operation: Operation, x: Tensor) -> bool:
        """Looks only at what is equal on all ranks: shape, type and device; never at strides."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor: ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrites x, contiguous or not, with that of the member `source`."""
        ...

    def close(self) -> None: ...


class ProcessGroupBackend:
    """torch.distributed's own: gloo for CPU tensors, NCCL for CUDA ones. Borrows the group."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.name = str(dist.get_backend(group))
        self._group = group
        self._size = group.size()
        self._device_type = device_type

    def accepts(self, operation: Operation, x: Tensor) -> bool:
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

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.all_reduce(x).chunk(self._size, dim)[self._group.rank()].contiguous()

    def broadcast(self, x: Tensor, source: int) -> None:
        dense = x.contiguous()
        dist.broadcast(dense, group=self._group, group_src=source)
        if dense is not x:
            x.copy_(dense)

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
        return self._backend_for("all_reduce", x).all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._backend_for("all_gather", x).all_gather(x, dim)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def _backend_for(self, operation: Operation, x: Tensor) -> CollectiveBackend:
        for backend in self._backends:
            if backend.accepts(operation, x):
                return backend
        raise ValueError(f"none of {self.names} accepts {operation} of {x.dtype} on {x.device}")
