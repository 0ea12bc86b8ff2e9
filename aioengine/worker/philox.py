"""Uniform numbers from a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011), vectorised over a batch.

A number depends on its seed and its place only, so it is the same on every device, in every
batch and layout, and after preemption.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_NUM_ROUNDS: Final = 10
_LOW: Final = np.uint64(0xFFFFFFFF)
_WORD: Final = np.uint64(32)


def philox4x32(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Four random words for each row of `counters` [N, 4] and `keys` [N, 2]."""
    x0, x1, x2, x3 = (counters[:, i] for i in range(4))
    key0, key1 = keys[:, 0], keys[:, 1]
    for _ in range(_NUM_ROUNDS):
        product0 = x0.astype(np.uint64) * _MULTIPLIERS[0]
        product1 = x2.astype(np.uint64) * _MULTIPLIERS[1]
        high0, low0 = _words(product0)
        high1, low1 = _words(product1)
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
        key0, key1 = key0 + _KEY_STEPS[0], key1 + _KEY_STEPS[1]
    return np.stack((x0, x1, x2, x3), axis=1)


def uniforms(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    choices: NDArray[np.int64],
    draw: int = 0,
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per row.

    Key = the seed's low and high word; counter = (position of the token to be drawn, choice index,
    draw index, 0).
    """
    counters = np.zeros((len(seeds), 4), np.uint32)
    counters[:, 0], counters[:, 1], counters[:, 2] = positions, choices, draw
    high, low = _words(seeds)
    words = philox4x32(counters, np.stack((low, high), axis=1)).astype(np.uint64)
    bits = (words[:, 0] >> np.uint64(5) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits * 2.0**-53


def _words(values: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    return (values >> _WORD).astype(np.uint32), (values & _LOW).astype(np.uint32)
