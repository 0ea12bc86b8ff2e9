"""Rotary position embedding, in the half-split form of Hugging Face checkpoints.

Shapes: T tokens · N heads · H head_dim · F = H / 2 frequencies.
"""

import math

import torch
from torch import Tensor, nn

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
    """Cosines and sines of all positions, float32; one table serves all layers of a stage."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_position: int, *, device: torch.device
    ) -> None:
        super().__init__()
        frequencies_F = rotary_frequencies(rope, head_dim)
        angles_PF = torch.outer(torch.arange(max_position).float(), frequencies_F)
        self.register_buffer("cos_PF", angles_PF.cos().to(device), persistent=False)
        self.register_buffer("sin_PF", angles_PF.sin().to(device), persistent=False)
        self.cos_PF: Tensor
        self.sin_PF: Tensor

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, F] for `rotate`, once per step."""
        cos_TF = self.cos_PF.index_select(0, positions_T).to(dtype)
        sin_TF = self.sin_PF.index_select(0, positions_T).to(dtype)
        return cos_TF[:, None], sin_TF[:, None]


def rotate(x_TNH: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + F]) by its angle."""
    first_TNF, second_TNF = x_TNH.chunk(2, dim=-1)
    return torch.cat(
        (
            first_TNF * cos_T1F - second_TNF * sin_T1F,
            second_TNF * cos_T1F + first_TNF * sin_T1F,
        ),
        dim=-1,
    )
