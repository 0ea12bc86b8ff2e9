"""Quantised blocks of GGUF -> float32, the common types quicker than `gguf` does it.

`gguf.quants` goes over a tensor once for every operation and copies between them: 12 ns a value,
which is most of the time that a small model takes to load. Here rows are taken in pieces that stay
in the processor's cache, and only what is rounded in the same way is done: results are equal, bit
for bit.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PIECE_VALUES: Final = 2**17
"""With what is made on the way, 1 MiB."""


def _halves(blocks_NB: Bytes) -> Floats:
    """A float16 number per block, from its two bytes."""
    halves: Floats = blocks_NB.copy().view(np.float16).astype(np.float32)
    return halves


def _unpack_q8_0(blocks_NB: Bytes, values_NK: Floats) -> None:
    np.multiply(blocks_NB[:, 2:].view(np.int8), _halves(blocks_NB[:, :2]), out=values_NK)


def _unpack_q4_0(blocks_NB: Bytes, values_NK: Floats) -> None:
    scales, codes = _halves(blocks_NB[:, :2]), blocks_NB[:, 2:]
    np.multiply((codes & 15).view(np.int8) - np.int8(8), scales, out=values_NK[:, :16])
    np.multiply((codes >> 4).view(np.int8) - np.int8(8), scales, out=values_NK[:, 16:])


def _unpack_q4_1(blocks_NB: Bytes, values_NK: Floats) -> None:
    scales, codes = _halves(blocks_NB[:, :2]), blocks_NB[:, 4:]
    np.multiply(codes & 15, scales, out=values_NK[:, :16])
    np.multiply(codes >> 4, scales, out=values_NK[:, 16:])
    values_NK += _halves(blocks_NB[:, 2:4])


UNPACK: Final[dict[GGMLQuantizationType, Callable[[Bytes, Floats], None]]] = {
    GGMLQuantizationType.Q8_0: _unpack_q8_0,
    GGMLQuantizationType.Q4_0: _unpack_q4_0,
    GGMLQuantizationType.Q4_1: _unpack_q4_1,
}


def unpack_rows(packed: Bytes, kind: GGMLQuantizationType) -> NDArray[Any]:
    """[rows, bytes] of whole blocks -> [rows, values] in float32. Raises NotImplementedError for a
    type that nobody can read."""
    unpack = UNPACK.get(kind)
    if unpack is None:
        return dequantize(packed, kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_rows, row_bytes = packed.shape
    row_size = row_bytes // block_bytes * block_size
    values = np.empty((num_rows, row_size), np.float32)
    step = max(1, PIECE_VALUES // max(row_size, 1))
    for first in range(0, num_rows, step):
        piece = np.ascontiguousarray(packed[first : first + step])
        unpack(piece.reshape(-1, block_bytes), values[first : first + step].reshape(-1, block_size))
    return values
