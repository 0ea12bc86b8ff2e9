"""Torch custom ops for collectives, which name their group by a string.

`torch.compile` traces through them, and compiled graphs carry a name instead of an object. The
name table below is the only global state of the engine. `define` + `impl` costs a fifth
of `torch.library.custom_op` per call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from aioengine.errors import EngineError


@dataclass(frozen=True, slots=True)
class Collectives:
    """What a group's name stands for."""

    size: int
    all_reduce: Callable[[Tensor], Tensor]
    all_gather: Callable[[Tensor, int], Tensor]


_groups: Final[dict[str, Collectives]] = {}


def register_group(name: str, collectives: Collectives) -> None:
    assert name not in _groups, f"group {name!r} is registered twice"
    _groups[name] = collectives


def unregister_group(name: str) -> None:
    del _groups[name]


def _find(name: str) -> Collectives:
    try:
        return _groups[name]
    except KeyError:
        raise EngineError(
            f"no open process group {name!r} in this process; open: {sorted(_groups) or 'none'}"
        ) from None


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _find(group).all_reduce(x)


def _all_reduce_shape(x: Tensor, group: str) -> Tensor:
    _find(group)
    return torch.empty_like(x)


def _all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    return _find(group).all_gather(x, dim)


def _all_gather_shape(x: Tensor, dim: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= _find(group).size
    return x.new_empty(shape)


torch.library.define("aioengine::all_reduce", "(Tensor x, str group) -> Tensor")
torch.library.impl("aioengine::all_reduce", "CompositeExplicitAutograd", _all_reduce)
torch.library.register_fake("aioengine::all_reduce", _all_reduce_shape)
torch.library.define("aioengine::all_gather", "(Tensor x, int dim, str group) -> Tensor")
torch.library.impl("aioengine::all_gather", "CompositeExplicitAutograd", _all_gather)
torch.library.register_fake("aioengine::all_gather", _all_gather_shape)

all_reduce: Final = torch.ops.aioengine.all_reduce.default
"""(x, group name) -> the sum of x over the group's ranks, as a new tensor."""
all_gather: Final = torch.ops.aioengine.all_gather.default
"""(x, dim, group name) -> every rank's x joined along `dim`, in rank order."""
