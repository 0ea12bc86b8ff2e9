"""Linear layers cut over the tp group.

Shapes: T tokens · I input features · O output features, each as many as this rank holds.
"""

from torch import Tensor
from torch.nn import functional

from aioengine.layers.module import Placement, ShardedModule, whole
from aioengine.layers.partition import Shard


class ColumnParallelLinear(ShardedModule):
    """Each rank computes the `outputs` (dim 0) of a full input; nothing is exchanged."""

    def __init__(self, in_features: int, outputs: Shard, *, bias: bool, place: Placement) -> None:
        super().__init__()
        assert outputs.dim == 0
        self.weight = place.empty(outputs.local_size, in_features)
        self.bias = place.empty(outputs.local_size) if bias else None
        self.shards = {"weight": outputs, "bias": outputs} if bias else {"weight": outputs}

    def forward(self, x_TI: Tensor) -> Tensor:
        return functional.linear(x_TI, self.weight, self.bias)


class RowParallelLinear(ShardedModule):
    """Each rank has the `inputs` (dim 1) of every output; the group adds up the products."""

    def __init__(self, inputs: Shard, out_features: int, *, bias: bool, place: Placement) -> None:
        super().__init__()
        assert inputs.dim == 1
        self.tp = place.tp
        self.weight = place.empty(out_features, inputs.local_size)
        self.bias = place.empty(out_features) if bias else None
        self.shards = {"weight": inputs}
        if bias:
            self.shards["bias"] = whole(out_features)

    def forward(self, x_TI: Tensor) -> Tensor:
        x_TO = self.tp.all_reduce(functional.linear(x_TI, self.weight))
        return x_TO if self.bias is None else x_TO + self.bias
