"""Linear layers cut over the tp group.

Shapes: T tokens · I input features · O output features, each as many as this rank holds.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from torch import Tensor, nn

from aioengine.layers.module import Placement, ShardedModule, whole
from aioengine.layers.partition import Shard
from aioengine.layers.quantized import packed_parts
from aioengine.layers.quantized_format import TILE, Format


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


class QuantizedWeight:
    """The same in blocks of one format."""

    def __init__(
        self, stored: Format, sizes: Sequence[int], in_features: int, place: Placement
    ) -> None:
        self._linear = place.backend.quantized_linear
        self._add = place.backend.add
        self._dtype = place.dtype
        self._matrix, self.parts = packed_parts(
            stored, sizes, in_features, place.memory, place.backend.quantize
        )

    def apply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        out_TO = self._linear(x_TI, self._matrix, self._dtype)
        return out_TO if bias_O is None else self._add(out_TO, bias_O)


class SideBySide:
    """Matrices that do not fit one: a product each."""

    def __init__(self, weights: Sequence[Weight], place: Placement) -> None:
        self._backend = place.backend
        self._weights = weights
        self.parts = [part for weight in weights for part in weight.parts]

    def apply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        out_TO = self._backend.side_by_side([weight.apply(x_TI) for weight in self._weights])
        return out_TO if bias_O is None else self._backend.add(out_TO, bias_O)


def weight_of(
    sizes: Sequence[int], formats: Sequence[Format | None], in_features: int, place: Placement
) -> Weight:
    """For parts of these numbers of rows and formats (None: of the stage's type). Neighbours of one
    format are one matrix."""
    weights: list[Weight] = []
    for stored, run in groupby(zip(formats, sizes, strict=True), key=itemgetter(0)):
        sizes_of_run = [size for _, size in run]
        if stored is None:
            weights.append(DenseWeight(sizes_of_run, in_features, place))
        elif all(size % TILE == 0 for size in sizes_of_run[:-1]):
            weights.append(QuantizedWeight(stored, sizes_of_run, in_features, place))
        else:
            weights += [QuantizedWeight(stored, [s], in_features, place) for s in sizes_of_run]
    return weights[0] if len(weights) == 1 else SideBySide(weights, place)


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

    No module: those who own it register its `parts`, in the order of `outputs`, under the names
    that these have there.
    """

    def __init__(
        self, in_features: int, outputs: Mapping[str, Shard], *, bias: bool, place: Placement
    ) -> None:
        sizes = [shard.local_size for shard in outputs.values()]
        formats = [place.within(name).format for name in outputs]
        self._weight = weight_of(sizes, formats, in_features, place)
        self._bias_O: Tensor | None = None
        biases: Sequence[nn.Parameter | None] = [None] * len(sizes)
        if bias:
            self._bias_O, biases = place.stacked(sizes)
        self.parts = [
            ColumnPart(*each)
            for each in zip(outputs.values(), self._weight.parts, biases, strict=True)
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
        self.add = place.backend.add
        self._weight = weight_of([out_features], [place.format], inputs.local_size, place)
        (self.weight,) = self._weight.parts
        self.bias = place.empty(out_features) if bias else None
        self.shards = {"weight": inputs}
        if bias:
            self.shards["bias"] = whole(out_features)

    def forward(self, x_TI: Tensor) -> Tensor:
        x_TO = self.tp.all_reduce(self._weight.apply(x_TI))
        return x_TO if self.bias is None else self.add(x_TO, self.bias)
