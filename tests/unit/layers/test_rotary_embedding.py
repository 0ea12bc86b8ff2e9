"""Rotary embedding: scaled frequencies at their limits, and rotation by position."""

import torch

from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.backend import TORCH
from aioengine.layers.memory import ParameterMemory
from aioengine.layers.module import Placement
from aioengine.layers.rotary import RotaryEmbedding, rotary_frequencies
from aioengine.model_config import RopeConfig

CPU = torch.device("cpu")
ALONE = GroupCoordinator("alone", (0,), 0, device=CPU)
PLACE = Placement(ALONE, torch.float32, ParameterMemory(CPU))


def test_linear_scaling_divides_every_frequency() -> None:
    plain = rotary_frequencies(RopeConfig(), 16)
    scaled = rotary_frequencies(RopeConfig(rope_type="linear", factor=4.0), 16)
    torch.testing.assert_close(scaled, plain / 4)


def test_llama3_keeps_fast_and_divides_slow_frequencies() -> None:
    plain = rotary_frequencies(RopeConfig(theta=500000.0), 128)
    scaled = rotary_frequencies(
        RopeConfig(theta=500000.0, rope_type="llama3", factor=8.0, original_max_position=8192), 128
    )
    assert torch.equal(scaled[:20], plain[:20])
    torch.testing.assert_close(scaled[-20:], plain[-20:] / 8)
    ratio = plain / scaled
    assert (ratio.diff() >= -1e-5).all()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_freq_factors_divide_one_by_one() -> None:
    factors = tuple(float(i + 1) for i in range(8))
    plain = rotary_frequencies(RopeConfig(), 16)
    scaled = rotary_frequencies(RopeConfig(rope_type="freq_factors", freq_factors=factors), 16)
    torch.testing.assert_close(scaled, plain / torch.tensor(factors))


def test_products_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 16, place=PLACE)
    q_H, k_H = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))

    def product(q_position: int, k_position: int) -> torch.Tensor:
        cos, sin = rotary(torch.tensor([q_position, k_position]), torch.float32)
        x_TMH = torch.stack((q_H, k_H))[:, None]
        TORCH.rotate(x_TMH, cos, sin)
        return x_TMH[0, 0] @ x_TMH[1, 0]

    torch.testing.assert_close(product(0, 0), q_H @ k_H)
    torch.testing.assert_close(product(40, 33), product(7, 0))
    assert not torch.isclose(product(40, 33), product(40, 32))


def test_memory_does_not_grow_with_the_positions() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 16, place=PLACE)
    cos, sin = rotary(torch.tensor([10_000_000]), torch.float32)
    angles = 1e7 * rotary_frequencies(RopeConfig(), 16)
    torch.testing.assert_close(cos[0, 0], angles.cos())
    torch.testing.assert_close(sin[0, 0], angles.sin())
    assert sum(buffer.nbytes for buffer in rotary.buffers()) == 8 * 4
