"""Torch custom ops for collectives, which name their group by a string.

`torch.compile` traces through them, and compiled graphs carry a name instead of an object. The
name table below is the only global state of the engine. `define` + `impl` costs a fifth
of `torch.library.custom_op` per call.

All three raise EngineError for a group that is not open and for a tensor that no backend of the
group takes, and ValueError for a dimension that x lacks or that cannot be divided; traced (on fake
tensors), too.
"""

from typing import Final

import torch
from torch import Tensor

from aioengine.dist.communicators import Communicator
from aioengine.errors import EngineError


class _OpenGroups(dict[str, Communicator]):
    """Group name -> communicator. A plain dict's lookup where the name is there."""

    def __missing__(self, name: str) -> Communicator:
        raise EngineError(
            f"no open process group {name!r} in this process; open: {sorted(self) or 'none'}"
        )


_groups: Final = _OpenGroups()


def register_group(name: str, communicator: Communicator) -> None:
    assert name not in _groups, f"group {name!r} is registered twice"
    _groups[name] = communicator


def unregister_group(name: str) -> None:
    del _groups[name]


def _checked_dim(operation: str, x: Tensor, dim: int) -> int:
    """`dim`, counted from the front."""
    num_dims = x.dim()
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"{operation}: a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    return dim % num_dims


def _divided_dim(x: Tensor, dim: int, group: str) -> int:
    """The same for a dimension that is cut into equal parts for the ranks of the group."""
    dim = _checked_dim("reduce_scatter", x, dim)
    num_ranks = _groups[group].world_size
    if x.shape[dim] % num_ranks:
        raise ValueError(
            f"reduce_scatter: dimension {dim} of shape {tuple(x.shape)} cannot be divided among "
            f"the {num_ranks} ranks of group {group!r}"
        )
    return dim


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _groups[group].all_reduce(x)


def _all_reduce_shape(x: Tensor, group: str) -> Tensor:
    _groups[group]
    return x.new_empty(x.shape)


def _all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    return _groups[group].all_gather(x, _checked_dim("all_gather", x, dim))


def _all_gather_shape(x: Tensor, dim: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[_checked_dim("all_gather", x, dim)] *= _groups[group].world_size
    return x.new_empty(shape)


def _reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    return _groups[group].reduce_scatter(x, _divided_dim(x, dim, group))


def _reduce_scatter_shape(x: Tensor, dim: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[_divided_dim(x, dim, group)] //= _groups[group].world_size
    return x.new_empty(shape)


torch.library.define("aioengine::all_reduce", "(Tensor x, str group) -> Tensor")
torch.library.impl("aioengine::all_reduce", "CompositeExplicitAutograd", _all_reduce)
torch.library.register_fake("aioengine::all_reduce", _all_reduce_shape)
torch.library.define("aioengine::all_gather", "(Tensor x, int dim, str group) -> Tensor")
torch.library.impl("aioengine::all_gather", "CompositeExplicitAutograd", _all_gather)
torch.library.register_fake("aioengine::all_gather", _all_gather_shape)
torch.library.define("aioengine::reduce_scatter", "(Tensor x, int dim, str group) -> Tensor")
torch.library.impl("aioengine::reduce_scatter", "CompositeExplicitAutograd", _reduce_scatter)
torch.library.register_fake("aioengine::reduce_scatter", _reduce_scatter_shape)

all_reduce: Final = torch.ops.aioengine.all_reduce.default
"""(x, group name) -> the sum of x over the group's ranks, as a new tensor."""
all_gather: Final = torch.ops.aioengine.all_gather.default
"""(x, dim, group name) -> every rank's x joined along `dim`, in rank order."""
reduce_scatter: Final = torch.ops.aioengine.reduce_scatter.default
"""(x, dim, group name) -> this rank's part, along `dim`, of the sum of x over the ranks."""
