"""What the layers with parameters share: where parameters live, what computes with them, and which
part of the published tensors they hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.backend import TORCH, LayerBackend
from aioengine.layers.partition import Shard


@dataclass(frozen=True, slots=True)
class Placement:
    """The tp group that shares a layer, the type and device of its parameters, and what computes
    with them."""

    tp: GroupCoordinator
    dtype: torch.dtype
    device: torch.device
    backend: LayerBackend = TORCH

    def empty(self, *shape: int) -> nn.Parameter:
        """Uninitialised memory: the loader fills it, padding included."""
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(data, requires_grad=False)

    def stacked(self, sizes: Sequence[int], *shape: int) -> tuple[Tensor, list[nn.Parameter]]:
        """Parameters of `sizes` rows that lie one behind the other, and all their rows as one
        tensor."""
        rows = torch.empty((sum(sizes), *shape), dtype=self.dtype, device=self.device)
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
