"""Normalisation. Shapes: T tokens · D hidden size."""

from torch import Tensor

from aioengine.layers.module import Placement, ShardedModule, whole


class RMSNorm(ShardedModule):
    """x / rms(x) · weight; the variance is computed in float32."""

    def __init__(self, size: int, eps: float, *, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.backend = place.backend
        self.weight = place.empty(size)
        self.shards = {"weight": whole(size)}

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.backend.rms_norm(x_TD, self.weight, self.eps)

    def add(self, x_TD: Tensor, y_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y (x without y), and that normalised."""
        if y_TD is None:
            return x_TD, self(x_TD)
        return self.backend.add_rms_norm(x_TD, y_TD, self.weight, self.eps)
