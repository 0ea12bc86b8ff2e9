"""Blocks are unpacked to what the gguf package makes of them, bit for bit."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from aioengine.weights.gguf_blocks import PIECE_VALUES, UNPACK, unpack_rows


def random_blocks(kind: GGMLQuantizationType, num_rows: int, row_blocks: int) -> np.ndarray:
    """Any codes; scales and minima are the finite halves below 256."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(num_rows)
    packed = rng.integers(0, 256, (num_rows, row_blocks, block_bytes), np.uint8)
    packed[:, :, 1::2][:, :, : block_bytes // 16 + 1] &= 0xBF  # the exponent's highest bit
    return packed.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", [*UNPACK, GGMLQuantizationType.Q5_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("num_rows", "row_blocks"),
    [(1, 1), (3, 18), (2 * PIECE_VALUES // 576 + 5, 18), (2, PIECE_VALUES // 32 + 1)],
)
def test_as_gguf_does(kind: GGMLQuantizationType, num_rows: int, row_blocks: int) -> None:
    packed = random_blocks(kind, num_rows, row_blocks)
    values = unpack_rows(packed, kind)
    expected = dequantize(packed, kind)
    assert (values.dtype, values.shape) == (np.float32, expected.shape)
    assert np.isfinite(expected).all()
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_columns_of_a_larger_table() -> None:
    """A shard's rows do not lie one behind the other."""
    kind = GGMLQuantizationType.Q4_1
    packed = random_blocks(kind, 7, 12)
    part = packed[:, 40:120]
    assert np.array_equal(unpack_rows(part, kind), dequantize(packed, kind)[:, 64:192])
