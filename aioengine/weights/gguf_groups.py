"""Blocks of GGUF files as groups of codes, scales and minima. Shapes as in quantized_format.py."""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from aioengine.layers.quantized_format import INT4, INT4_FLOAT32, INT8, Format, Groups

_Bytes = NDArray[np.uint8]
"""[O, blocks of a row, bytes of a block]."""


def _q8_0(blocks: _Bytes) -> Groups:
    return Groups(_tensor(blocks[..., 2:].view(np.int8)), _halves(blocks, 0), None)


def _q4_0(blocks: _Bytes) -> Groups:
    """Codes stand for -8 to 7, which the minimum makes of 0 to 15."""
    scales_OG = _halves(blocks, 0)
    return Groups(_nibbles(blocks[..., 2:]), scales_OG, scales_OG * -8)


def _q4_1(blocks: _Bytes) -> Groups:
    return Groups(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(blocks: _Bytes) -> Groups:
    """Eight groups a block: their scales and minima are 6-bit multiples of two float16s."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    # 32 bytes hold the codes of two neighbouring groups.
    codes = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    codes = np.concatenate([codes & 15, codes >> 4], axis=-2)
    num_groups = blocks.shape[1] * 8
    scale_OB1, minimum_OB1 = (_halves(blocks, at).float()[..., None] for at in (0, 2))
    return Groups(
        _tensor(codes.reshape(len(blocks), num_groups, 32)),
        (_tensor(scales) * scale_OB1).flatten(1),
        (_tensor(minima) * -minimum_OB1).flatten(1),
    )


def _halves(blocks: _Bytes, at: int) -> Tensor:
    """The float16 at this byte of each block."""
    return _tensor(np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0])


def _nibbles(packed: _Bytes) -> Tensor:
    return _tensor(np.concatenate([packed & 15, packed >> 4], axis=-1))


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


_UNPACK: Final[dict[GGMLQuantizationType, Callable[[_Bytes], Groups]]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
}


_FORMATS: Final[dict[GGMLQuantizationType, tuple[Format, ...]]] = {
    GGMLQuantizationType.Q8_0: (INT8,),
    GGMLQuantizationType.Q4_0: (INT4,),
    GGMLQuantizationType.Q4_1: (INT4,),
    GGMLQuantizationType.Q4_K: (INT4_FLOAT32, INT4),
}


def formats_of(kind: GGMLQuantizationType) -> tuple[Format, ...]:
    """In which blocks of this type can be kept: the first one exactly; a second one takes less
    memory, with scales and minima rounded to float16."""
    return _FORMATS.get(kind, ())


def groups_of(packed: _Bytes, kind: GGMLQuantizationType, block_bytes: int) -> Groups:
    """Of rows of whole blocks, [O, bytes]."""
    return _UNPACK[kind](packed.reshape(len(packed), -1, block_bytes))
