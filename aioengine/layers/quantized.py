"""Weights of linear layers and embeddings that stay in 8 or 4 bits.

Shapes: T tokens · I input features · O output features · G groups of 32 inputs · B bytes ·
C = 4 neighbouring inputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from aioengine.layers.memory import ParameterMemory
from aioengine.layers.quantized_format import TILE, Format, Groups, pack, quantize, unpack

Quantize = Callable[[Tensor, Format, Tensor], None]
"""Writes a matrix of floats [O, I] to blocks of a format: the first ones, and zeros to the rest."""


def quantize_by_torch(values_OI: Tensor, to: Format, blocks_TGB: Tensor) -> None:
    pack(quantize(values_OI, to), to, blocks_TGB)


class PackedParameter(nn.Parameter):
    """A matrix [O, I] in blocks, uint8 [tiles, G, B]; `shape_OI` is what they stand for.

    No float tensor of the published shape can be copied into it by mistake: `fill` is how values
    come in, `dequantize` how they come out.
    """

    format: Format
    shape_OI: tuple[int, int]
    _quantize: Quantize

    def __new__(
        cls,
        blocks_TGB: Tensor,
        stored: Format,
        shape_OI: tuple[int, int],
        quantize: Quantize = quantize_by_torch,
    ) -> "PackedParameter":
        parameter = torch.Tensor._make_subclass(cls, blocks_TGB, False)
        parameter.format = stored
        parameter.shape_OI = shape_OI
        parameter._quantize = quantize
        return parameter

    @classmethod
    def empty(
        cls,
        stored: Format,
        shape_OI: tuple[int, int],
        memory: ParameterMemory,
        quantize: Quantize = quantize_by_torch,
    ) -> "PackedParameter":
        blocks_TGB = memory.empty(stored.packed_shape(*shape_OI), torch.uint8)
        return cls(blocks_TGB, stored, shape_OI, quantize)

    @torch.no_grad()
    def fill(self, values: Tensor | Groups) -> None:
        """Floats [O, I], or groups of this format: its first rows and columns; the rest is zero."""
        if isinstance(values, Tensor):
            self._quantize(values, self.format, self.data)
        else:
            pack(values, self.format, self.data)

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """Float32 [O, I]."""
        num_outputs, num_inputs = self.shape_OI
        return unpack(self.data, self.format).dequantize()[:num_outputs, :num_inputs]

    @torch.no_grad()
    def rows(self, indices_T: Tensor) -> Tensor:
        """Some rows, float32 [T, I]; the others are not dequantised."""
        stored, tiles_T, lanes_T = self.format, indices_T // TILE, indices_T % TILE

        def chosen(start: int, stop: int, dtype: torch.dtype) -> Tensor:
            """[T, G, …] of what lies by outputs from byte `start` to `stop` of a block."""
            values = self.data[..., start:stop].view(dtype)
            by_output = values.view(*values.shape[:2], -1, TILE)
            return by_output[tiles_T, :, :, lanes_T]

        size = stored.scales_bytes
        codes_TGC = chosen(stored.codes_at, stored.block_bytes, torch.int32).view(torch.uint8)
        scales_TG1 = chosen(0, size, stored.scale_dtype).float()
        if stored.bits == 8:
            values_TGK = codes_TGC.view(torch.int8) * scales_TG1
        else:
            codes_TGK = torch.cat([codes_TGC & 15, codes_TGC >> 4], dim=-1)
            values_TGK = codes_TGK * scales_TG1
            values_TGK += chosen(size, 2 * size, stored.scale_dtype).float()
        return values_TGK.flatten(1)[:, : self.shape_OI[1]]


def quantized_linear(x_TI: Tensor, weight: PackedParameter, dtype: torch.dtype) -> Tensor:
    """[T, O] in `dtype`: the weights in float, for once. Right on any device."""
    return functional.linear(x_TI.float(), weight.dequantize()).to(dtype)


def packed_parts(
    stored: Format,
    sizes: Sequence[int],
    in_features: int,
    memory: ParameterMemory,
    quantize: Quantize = quantize_by_torch,
) -> tuple[PackedParameter, list[PackedParameter]]:
    """A matrix of the rows of all parts, one below the other, and the parts, which are views of it.

    All but the last must fill whole tiles.
    """
    assert all(size % TILE == 0 for size in sizes[:-1])
    whole = PackedParameter.empty(stored, (sum(sizes), in_features), memory)
    tiles = [-(-size // TILE) for size in sizes]
    return whole, [
        PackedParameter(blocks_TGB, stored, (size, in_features), quantize)
        for blocks_TGB, size in zip(whole.data.split_with_sizes(tiles), sizes, strict=True)
    ]
