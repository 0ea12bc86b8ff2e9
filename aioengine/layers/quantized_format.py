"""Weights in 8 and 4 bits: how they are made, and how they lie in memory.

Shapes: O outputs · I inputs · G groups of 32 inputs · K = 32 · T tiles of 16 outputs · B bytes.

Every 32 inputs of an output are a group with a scale of its own. A weight is scale · code (int8:
codes -128…127) or scale · code + minimum (int4: codes 0…15); GGUF's Q8_0, Q4_0, Q4_1 and Q4_K are
the same functions, so that their weights are kept exactly. Inputs and outputs that fill no group
or tile are zeros.

In memory the same group of 16 outputs is a block: 16 scales, 16 minima (int4), then codes, four
neighbouring inputs of one output after those of the output before. So 32-bit lanes of a vector
belong to one output each, and products need no sums across lanes. Blocks of a tile lie one after
the other, so whoever computes a tile reads memory straight on. A byte of int4 holds input i in its
low and input i + 16 in its high half.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

GROUP: Final = 32
TILE: Final = 16
_CHUNK: Final = 4
"""Neighbouring inputs of one output."""


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored. `bits` 8 or 4; only 4 has minima."""

    name: str
    bits: int
    scale_dtype: torch.dtype

    @property
    def has_minima(self) -> bool:
        return self.bits == 4

    @property
    def scales_bytes(self) -> int:
        """Of a block; minima take as many."""
        return TILE * self.scale_dtype.itemsize

    @property
    def codes_at(self) -> int:
        """The byte of a block where its codes begin."""
        return self.scales_bytes * (2 if self.has_minima else 1)

    @property
    def block_bytes(self) -> int:
        return self.codes_at + TILE * GROUP * self.bits // 8

    def packed_shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
        """[T, G, B]."""
        return -(-num_outputs // TILE), -(-num_inputs // GROUP), self.block_bytes


INT8: Final = Format("int8", 8, torch.float16)
INT4: Final = Format("int4", 4, torch.float16)
INT4_FLOAT32: Final = Format("int4 with float32 scales", 4, torch.float32)
"""Q4_K without any rounding: its scales and minima are products that float16 cannot hold."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Weights as codes, scales and minima, one row of groups per output."""

    codes_OGK: Tensor
    """int8 or uint8."""
    scales_OG: Tensor
    minima_OG: Tensor | None

    def rows(self, order_O: Tensor) -> "Groups":
        minima_OG = None if self.minima_OG is None else self.minima_OG[order_O]
        return Groups(self.codes_OGK[order_O], self.scales_OG[order_O], minima_OG)

    def columns(self, first: int, last: int) -> "Groups":
        """Groups first to last - 1 of every output."""
        minima_OG = None if self.minima_OG is None else self.minima_OG[:, first:last]
        return Groups(self.codes_OGK[:, first:last], self.scales_OG[:, first:last], minima_OG)

    def dequantize(self) -> Tensor:
        """Float32 [O, G · 32]."""
        values_OGK = self.codes_OGK.float() * self.scales_OG.float()[..., None]
        if self.minima_OG is not None:
            values_OGK += self.minima_OG.float()[..., None]
        return values_OGK.flatten(1)


# --- from floats ----------------------------------------------------------------------------------

_AT_ONCE: Final = 1 << 16
"""Weights that are quantised together: few enough to stay in a core's cache."""
_STEPS: Final = (15.0, 16.5)
"""Parts of a group's range from which the search for a scale begins. More than 15 cut off its two
ends."""
_NUM_FITS: Final = 2
_LARGEST: Final = torch.finfo(torch.float16).max


def quantize(weight_OI: Tensor, to: Format) -> Groups:
    """The nearest that the format can say, of weights of any float type."""
    num_outputs, num_inputs = weight_OI.shape
    step = max(1, _AT_ONCE // num_inputs)
    parts = []
    for first in range(0, num_outputs, step):
        rows_OI = weight_OI[first : first + step]
        padded_OI = functional.pad(rows_OI.float(), (0, -num_inputs % GROUP))
        values_OGK = padded_OI.view(len(rows_OI), -1, GROUP)
        parts.append(_symmetric(values_OGK) if to.bits == 8 else _asymmetric(values_OGK))
    minima = [part.minima_OG for part in parts if part.minima_OG is not None]
    return Groups(
        torch.cat([part.codes_OGK for part in parts]),
        torch.cat([part.scales_OG for part in parts]).to(to.scale_dtype),
        torch.cat(minima).to(to.scale_dtype) if minima else None,
    )


def _symmetric(values_OGK: Tensor) -> Groups:
    """8 bits: the largest weight of a group becomes 127 or -127."""
    scales_OG = _half(values_OGK.abs().amax(-1) / 127)
    codes_OGK = (values_OGK * _inverse(scales_OG)[..., None]).round_().clamp_(-127, 127)
    return Groups(codes_OGK.to(torch.int8), scales_OG, None)


def _asymmetric(values_OGK: Tensor) -> Groups:
    """4 bits: the smallest and largest weight become 0 and 15, or what has the least squared error
    of a few other scales and minima, if that is less. They are found by turns: codes from scale and
    minimum, then these from the codes, by a least-squares fit."""
    low_OG, high_OG = torch.aminmax(values_OGK, dim=-1)
    first = _half((high_OG - low_OG) / 15), _half(low_OG)
    scales_OG, minima_OG = first
    best_OG = _squared_errors(values_OGK, _nearest(values_OGK, *first), *first)
    for step in _STEPS:
        scale_OG = (high_OG - low_OG) / step
        minimum_OG = (low_OG + high_OG) / 2 - scale_OG * 7.5
        for _ in range(_NUM_FITS):
            codes_OGK = _nearest(values_OGK, scale_OG, minimum_OG)
            scale_OG, minimum_OG = _fit(values_OGK, codes_OGK, first)
        scale_OG, minimum_OG = _half(scale_OG), _half(minimum_OG)
        codes_OGK = _nearest(values_OGK, scale_OG, minimum_OG)
        errors_OG = _squared_errors(values_OGK, codes_OGK, scale_OG, minimum_OG)
        is_better_OG = errors_OG < best_OG
        scales_OG = torch.where(is_better_OG, scale_OG, scales_OG)
        minima_OG = torch.where(is_better_OG, minimum_OG, minima_OG)
        best_OG = torch.minimum(errors_OG, best_OG)
    codes_OGK = _nearest(values_OGK, scales_OG, minima_OG)
    return Groups(codes_OGK.to(torch.uint8), scales_OG, minima_OG)


def _fit(
    values_OGK: Tensor, codes_OGK: Tensor, otherwise: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Scale and minimum with the least squared error for given codes; `otherwise` where all codes
    are equal."""
    codes_OG, values_OG = codes_OGK.sum(-1), values_OGK.sum(-1)
    squares_OG = torch.linalg.vecdot(codes_OGK, codes_OGK)
    products_OG = torch.linalg.vecdot(codes_OGK, values_OGK)
    spread_OG = GROUP * squares_OG - codes_OG * codes_OG
    scales_OG = (GROUP * products_OG - codes_OG * values_OG) / spread_OG
    minima_OG = (values_OG - scales_OG * codes_OG) / GROUP
    fits_OG = (spread_OG > 0) & (scales_OG > 0)
    return (
        torch.where(fits_OG, scales_OG, otherwise[0]),
        torch.where(fits_OG, minima_OG, otherwise[1]),
    )


def _nearest(values_OGK: Tensor, scales_OG: Tensor, minima_OG: Tensor) -> Tensor:
    """Codes, as floats."""
    codes_OGK = values_OGK - minima_OG[..., None]
    return codes_OGK.mul_(_inverse(scales_OG)[..., None]).round_().clamp_(0, 15)


def _squared_errors(
    values_OGK: Tensor, codes_OGK: Tensor, scales_OG: Tensor, minima_OG: Tensor
) -> Tensor:
    errors_OGK = torch.addcmul(minima_OG[..., None], codes_OGK, scales_OG[..., None])
    return errors_OGK.sub_(values_OGK).square_().sum(-1)


def _inverse(scales_OG: Tensor) -> Tensor:
    """0 for 0: a group of equal weights, or of weights too small for a scale."""
    return torch.where(scales_OG > 0, 1 / scales_OG, 0)


def _half(values_OG: Tensor) -> Tensor:
    """Rounded to what float16 can hold."""
    return values_OG.clamp(-_LARGEST, _LARGEST).half().float()


# --- in memory ------------------------------------------------------------------------------------


def pack(groups: Groups, to: Format, packed_TGB: Tensor) -> None:
    """Writes groups to blocks; outputs and groups beyond them become zeros."""
    num_outputs, num_groups = groups.scales_OG.shape
    num_tiles = -(-num_outputs // TILE)
    packed_TGB[num_tiles:].zero_()
    packed_TGB[:, num_groups:].zero_()
    blocks_TGB = packed_TGB[:num_tiles, :num_groups]
    scales = (
        [groups.scales_OG] if groups.minima_OG is None else [groups.scales_OG, groups.minima_OG]
    )
    for place, values_OG in enumerate(scales):
        tiled_TGO = _tiles(values_OG.to(to.scale_dtype)).transpose(1, 2).contiguous()
        at = place * to.scales_bytes
        blocks_TGB[..., at : at + to.scales_bytes] = tiled_TGO.view(torch.uint8)
    codes_OGK = groups.codes_OGK.view(torch.uint8)
    if to.bits == 4:
        low_OGK, high_OGK = codes_OGK.chunk(2, dim=-1)
        codes_OGK = low_OGK | (high_OGK << 4)
    chunks_TOGC = _tiles(codes_OGK.contiguous().view(torch.int32))
    chunks_TGCO = chunks_TOGC.permute(0, 2, 3, 1).contiguous()
    blocks_TGB[..., to.codes_at :] = chunks_TGCO.view(torch.uint8).flatten(2)


def unpack(packed_TGB: Tensor, stored: Format) -> Groups:
    """The groups of all blocks, 16 outputs a tile."""
    scales_OG = _untiled_scales(packed_TGB, 0, stored)
    minima_OG = _untiled_scales(packed_TGB, 1, stored) if stored.has_minima else None
    codes_TGB = packed_TGB[..., stored.codes_at :].contiguous()
    num_tiles, num_groups, _ = packed_TGB.shape
    chunks_TGCO = codes_TGB.view(torch.int32).view(num_tiles, num_groups, -1, TILE)
    codes_OGK = chunks_TGCO.permute(0, 3, 1, 2).flatten(0, 1).contiguous().view(torch.uint8)
    if stored.bits == 8:
        return Groups(codes_OGK.view(torch.int8), scales_OG, None)
    return Groups(torch.cat([codes_OGK & 15, codes_OGK >> 4], dim=-1), scales_OG, minima_OG)


def _untiled_scales(packed_TGB: Tensor, place: int, stored: Format) -> Tensor:
    at = place * stored.scales_bytes
    bytes_TGB = packed_TGB[..., at : at + stored.scales_bytes].contiguous()
    return bytes_TGB.view(stored.scale_dtype).transpose(1, 2).flatten(0, 1)


def _tiles(rows_O: Tensor) -> Tensor:
    """[O, …] as [T, 16, …], with zeros for outputs that fill no tile."""
    missing = -rows_O.shape[0] % TILE
    if missing:
        rows_O = torch.cat([rows_O, rows_O.new_zeros(missing, *rows_O.shape[1:])])
    return rows_O.view(-1, TILE, *rows_O.shape[1:])
