"""Linear layers cut over the tp group.

Shapes: T tokens · I input features · O output features, each as many as this rank holds.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from aioengine.layers.module import Placement, ShardedModule, whole
from aioengine.layers.partition import Shard


class Weight(Protocol):
    """The matrix of a product, stored in a form of its own."""

    @property
    def parts(self) -> Sequence[nn.Parameter]:
        """What the loader fills: the rows of each published tensor, in their order."""
        ...

    def apply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """[T, O], all parts' outputs side by side."""
        ...


class DenseWeight:
    """The rows of all parts one below the other, in the stage's type.

    The parts are views of it: who fills or updates them in place changes the product.
    """

    def __init__(self, sizes: Sequence[int], in_features: int, place: Placement) -> None:
        self._linear = place.backend.linear
        self._matrix_OI, self.parts = place.stacked(sizes, in_features)

    def apply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return self._linear(x_TI, self._matrix_OI, bias_O)


class ColumnPart(ShardedModule):
    """The parameters of one published layer among those that `ColumnParallelLinear` computes."""

    def __init__(self, outputs: Shard, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        assert outputs.dim == 0
        self.weight = weight
        self.bias = bias
        self.shards = {"weight": outputs} if bias is None else {"weight": outputs, "bias": outputs}


class ColumnParallelLinear:
    """Published layers with one input as one product: each rank computes its `outputs` (dim 0) of
    every layer from the full input; nothing is exchanged.

    No module: those who own it register its `parts`, under their published names.
    """

    def __init__(
        self, in_features: int, outputs: Sequence[Shard], *, bias: bool, place: Placement
    ) -> None:
        sizes = [shard.local_size for shard in outputs]
        self._weight: Weight = DenseWeight(sizes, in_features, place)
        self._bias_O: Tensor | None = None
        biases: Sequence[nn.Parameter | None] = [None] * len(sizes)
        if bias:
            self._bias_O, biases = place.stacked(sizes)
        self.parts = [
            ColumnPart(*each) for each in zip(outputs, self._weight.parts, biases, strict=True)
        ]

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, O], the layers' outputs side by side."""
        return self._weight.apply(x_TI, self._bias_O)


class RowParallelLinear(ShardedModule):
    """Each rank has the `inputs` (dim 1) of every output; the group adds up the products."""

    def __init__(self, inputs: Shard, out_features: int, *, bias: bool, place: Placement) -> None:
        super().__init__()
        assert inputs.dim == 1
        self.tp = place.tp
        self._weight: Weight = DenseWeight([out_features], inputs.local_size, place)
        (self.weight,) = self._weight.parts
        self.bias = place.empty(out_features) if bias else None
        self.shards = {"weight": inputs}
        if bias:
            self.shards["bias"] = whole(out_features)

    def forward(self, x_TI: Tensor) -> Tensor:
        x_TO = self.tp.all_reduce(self._weight.apply(x_TI))
        return x_TO if self.bias is None else x_TO + self.bias
