"""Normalisation. Shapes: T tokens · D hidden size."""

from torch import Tensor
from torch.nn import functional

from aioengine.layers.module import Placement, ShardedModule, whole


class RMSNorm(ShardedModule):
    """x / rms(x) · weight; the variance is computed in float32."""

    def __init__(self, size: int, eps: float, *, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = place.empty(size)
        self.shards = {"weight": whole(size)}

    def forward(self, x_TD: Tensor) -> Tensor:
        return functional.rms_norm(x_TD, self.weight.shape, self.weight, self.eps)
