"""Products with quantised weights, as a digest of their bits. As a program: for the processor that
numba was told to compile for."""

import hashlib
from typing import Any

import numpy as np

from aioengine.kernels.codegen import BFLOAT16, FLOAT32
from aioengine.kernels.quantized import QuantizedLinear
from aioengine.kernels.team import Team

NUM_ROWS, NUM_INPUTS, NUM_OUTPUTS = 11, 80, 40
NUM_TILES, NUM_GROUPS = 3, 3


def random_blocks(rng: np.random.Generator, bits: int) -> Any:
    """With any codes, -128 too, and scales and minima between 1 and 2."""
    scales = 16 * (2 if bits == 4 else 1)
    blocks = rng.integers(0, 256, (NUM_TILES, NUM_GROUPS, 2 * scales + 64 * bits), dtype=np.uint8)
    blocks[..., : 2 * scales] = (
        (1 + rng.random((NUM_TILES, NUM_GROUPS, scales))).astype(np.float16).view(np.uint8)
    )
    return blocks


def digests() -> list[str]:
    """By integers for x in bfloat16, by floats for x in float32; each in 8 and 4 bits."""
    team, rng = Team(1), np.random.default_rng(1)
    found = []
    for kind in (BFLOAT16, FLOAT32):
        product = QuantizedLinear(team, kind)
        x = rng.standard_normal((NUM_ROWS, NUM_INPUTS)).astype(np.float32)
        if kind is BFLOAT16:
            x = (x.view(np.uint32) >> 16).astype(np.uint16)
        for bits in (8, 4):
            blocks, out = random_blocks(rng, bits), np.empty((NUM_ROWS, NUM_OUTPUTS), np.float32)
            addresses = x.ctypes.data, x.strides[0], blocks.ctypes.data, out.ctypes.data
            product(bits, False, *addresses, True, NUM_ROWS, NUM_INPUTS, NUM_OUTPUTS)
            found.append(hashlib.sha256(out.tobytes()).hexdigest())
    team.close()
    return found


if __name__ == "__main__":
    print(*digests())
