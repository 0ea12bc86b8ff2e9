"""What the layers with parameters share: where parameters live, what computes with them, and which
part of the published tensors they hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.backend import TORCH, LayerBackend
from aioengine.layers.memory import ParameterMemory
from aioengine.layers.partition import Shard
from aioengine.layers.quantized import PackedParameter
from aioengine.layers.quantized_format import Format


@dataclass(frozen=True, slots=True)
class Placement:
    """The tp group that shares a layer, the type and memory of its parameters, and what computes
    with them.

    `formats` says by full names which matrices are kept quantised; `name` is the published name of
    what is being built.
    """

    tp: GroupCoordinator
    dtype: torch.dtype
    memory: ParameterMemory
    backend: LayerBackend = TORCH
    formats: Mapping[str, Format] = field(default_factory=dict)
    name: str = ""

    def within(self, name: str) -> "Placement":
        """Of a part that is published as `name` within this one."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def format(self) -> Format | None:
        """Of the weight of what is being built; None: it is of type `dtype`."""
        return self.formats.get(f"{self.name}.weight")

    def empty(self, *shape: int) -> nn.Parameter:
        """Uninitialised memory: the loader fills it, padding included."""
        return nn.Parameter(self.memory.empty(shape, self.dtype), requires_grad=False)

    def matrix(self, num_rows: int, num_columns: int) -> nn.Parameter:
        """The same for the weight of what is being built, in its format."""
        if self.format is None:
            return self.empty(num_rows, num_columns)
        shape = num_rows, num_columns
        return PackedParameter.empty(self.format, shape, self.memory, self.backend.quantize)

    def stacked(self, sizes: Sequence[int], *shape: int) -> tuple[Tensor, list[nn.Parameter]]:
        """Parameters of `sizes` rows that lie one behind the other, and all their rows as one
        tensor."""
        rows = self.memory.empty((sum(sizes), *shape), self.dtype)
        return rows, [
            nn.Parameter(part, requires_grad=False) for part in rows.split_with_sizes(sizes)
        ]


class ShardedModule(nn.Module):
    """A layer with parameters. `shards` says, by parameter name, what the loader puts in each."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, Shard] = {}


def whole(size: int) -> Shard:
    """A vector that every rank holds in full."""
    return Shard(0, 0, size, size, size)
