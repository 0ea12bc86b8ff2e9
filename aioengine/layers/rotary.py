"""Rotary position embedding, in the half-split form of Hugging Face checkpoints.

Shapes: T tokens · F = head_dim / 2 frequencies.
"""

import math

import torch
from torch import Tensor, nn

from aioengine.layers.module import Placement
from aioengine.model_config import RopeConfig


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [F]."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies_F = 1.0 / rope.theta**exponents_F
    if rope.rope_type == "linear":
        return frequencies_F / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies_F, rope)
    if rope.rope_type == "freq_factors":
        return frequencies_F / torch.tensor(rope.freq_factors)
    return frequencies_F


def _llama3(frequencies_F: Tensor, rope: RopeConfig) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between interpolated."""
    turns_F = rope.original_max_position * frequencies_F / (2 * math.pi)
    kept_F = (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept_F = kept_F.clamp(0, 1)
    return kept_F * frequencies_F + (1 - kept_F) * frequencies_F / rope.factor


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a step's positions; one module serves all layers of a stage.

    Computed in float32 in each step, not looked up: a table would have to reach as far as the
    model's positions (ten million in some models, whatever the KV cache holds).
    """

    def __init__(self, rope: RopeConfig, head_dim: int, *, place: Placement) -> None:
        super().__init__()
        self.angles = place.backend.angles
        frequencies_F = rotary_frequencies(rope, head_dim).to(place.device)
        self.register_buffer("frequencies_F", frequencies_F, persistent=False)
        self.frequencies_F: Tensor

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, F] for `LayerBackend.rotate`, once per step."""
        return self.angles(positions_T, self.frequencies_F, dtype)
