"""Layers on CPU by compiled kernels. Needs numba.

Shapes: T tokens · I input features · O output features · D hidden size · M heads · H head_dim ·
F = H / 2.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.kernels.codegen import BFLOAT16, FEATURES, FLOAT16, FLOAT32
from aioengine.kernels.elementwise import Elementwise
from aioengine.kernels.embedding import Embedding
from aioengine.kernels.linear import Linear
from aioengine.kernels.quantized import QuantizedLinear
from aioengine.kernels.quantizing import Quantizer
from aioengine.kernels.rotary import Angles
from aioengine.kernels.team import Team
from aioengine.layers.quantized import PackedParameter
from aioengine.layers.quantized_format import GROUP, TILE, Format

KINDS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""What stands for a type in the kernels."""

_INSTRUCTIONS: Final = {
    torch.bfloat16: {"+amx-bf16"},
    torch.float16: {"+avx512fp16", "+amx-fp16"},
}
_TORCH_ROWS: Final = 16


def torch_rows(dtype: torch.dtype, features: set[str]) -> int | None:
    """From how many rows on torch computes a product: never (None), or where the processor has
    instructions for products of the type that oneDNN uses and our kernels do not. The processor and
    the number of rows alone decide, so that two runs give the same tokens.

    | type | instructions | 1 to 15 rows | from 16 rows on |
    |---|---|---|---|
    | float32 | | ours | ours |
    | bfloat16 | none, avx512bf16 | ours | ours |
    | bfloat16 | AMX | ours | torch |
    | float16 | none | ours | ours |
    | float16 | avx512fp16, AMX | ours | torch |
    """
    return _TORCH_ROWS if features & _INSTRUCTIONS.get(dtype, set()) else None


class CpuBackend:
    """A LayerBackend's functions for one type."""

    def __init__(self, dtype: torch.dtype, team: Team) -> None:
        self._dtype = dtype
        self._size = dtype.itemsize
        self._embedding = Embedding(team, KINDS[dtype])
        self._angles = Angles(team, KINDS[dtype])
        self._team = team
        self._quantized_product = QuantizedLinear(team, KINDS[dtype])
        self._quantizer = Quantizer(team)
        self._elementwise = Elementwise(team, KINDS[dtype])
        self._torch_rows = torch_rows(dtype, FEATURES)

    @cached_property
    def _product(self) -> Linear:
        """Only for those who have such weights: its kernels take seconds to compile."""
        return Linear(self._team, KINDS[self._dtype])

    def embed(self, ids_T: Tensor, weight: Tensor, first: int | None, dtype: torch.dtype) -> Tensor:
        assert dtype == self._dtype
        if isinstance(weight, PackedParameter):
            (num_rows, num_features), stored = weight.shape_OI, weight.format
            bits, has_float32_scales = stored.bits, stored.scale_dtype == torch.float32
        else:
            (num_rows, num_features), bits, has_float32_scales = weight.shape, 0, False
        out_TD = torch.empty((len(ids_T), num_features), dtype=dtype)
        self._embedding(
            ids_T.contiguous().data_ptr(),
            len(ids_T),
            weight.data_ptr(),
            first or 0,
            num_rows,
            num_features,
            bits,
            has_float32_scales,
            out_TD.data_ptr(),
        )
        return out_TD

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self._torch_rows is not None and x_TI.shape[0] >= self._torch_rows:
            return functional.linear(x_TI, weight_OI, bias_O)
        return self._multiply(x_TI, weight_OI, bias_O, self._dtype)

    def logits(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """Not rounded to the type in between: the sums are float32."""
        if self._torch_rows is not None and x_TI.shape[0] >= self._torch_rows:
            return functional.linear(x_TI, weight_OI).float()
        return self._multiply(x_TI, weight_OI, None, torch.float32)

    def quantized_linear(self, x_TI: Tensor, weight: PackedParameter, dtype: torch.dtype) -> Tensor:
        assert dtype in (self._dtype, torch.float32)
        x_TI = x_TI.contiguous()
        num_outputs, num_inputs = weight.shape_OI
        out_TO = torch.empty((x_TI.shape[0], num_outputs), dtype=dtype)
        self._quantized_product(
            weight.format.bits,
            weight.format.scale_dtype == torch.float32,
            x_TI.data_ptr(),
            num_inputs * self._size,
            weight.data_ptr(),
            out_TO.data_ptr(),
            dtype == torch.float32,
            x_TI.shape[0],
            num_inputs,
            num_outputs,
        )
        return out_TO

    def quantize(self, values_OI: Tensor, to: Format, blocks_TGB: Tensor) -> None:
        if values_OI.dtype not in KINDS:
            values_OI = values_OI.float()
        values_OI = values_OI.contiguous()
        num_outputs, num_inputs = values_OI.shape
        blocks_TGB[-(-num_outputs // TILE) :].zero_()
        blocks_TGB[:, -(-num_inputs // GROUP) :].zero_()
        self._quantizer(
            to.bits,
            to.scale_dtype == torch.float32,
            KINDS[values_OI.dtype],
            values_OI.data_ptr(),
            num_outputs,
            num_inputs,
            blocks_TGB.data_ptr(),
            blocks_TGB.stride(0),
        )

    def _multiply(
        self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        (num_rows, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
        x_TI = x_TI.contiguous()
        out_TO = x_TI.new_empty(num_rows, num_outputs, dtype=dtype)
        self._product(
            x_TI.data_ptr(),
            num_inputs * self._size,
            weight_OI.data_ptr(),
            0 if bias_O is None else bias_O.data_ptr(),
            out_TO.data_ptr(),
            dtype.itemsize,
            num_rows,
            num_inputs,
            num_outputs,
        )
        return out_TO

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        num_rows, width = len(parts[0]), sum(part.shape[1] for part in parts)
        out_TO = parts[0].new_empty(num_rows, width)
        place = out_TO.data_ptr()
        for part_TO in parts:
            num_columns = part_TO.shape[1]
            assert part_TO.stride(1) == 1
            self._elementwise.copy(
                place,
                width * self._size,
                part_TO.data_ptr(),
                part_TO.stride(0) * self._size,
                num_rows,
                num_columns,
            )
            place += num_columns * self._size
        return out_TO

    def add(self, x_TD: Tensor, y: Tensor) -> Tensor:
        x_TD, y = x_TD.contiguous(), y.contiguous()
        out_TD = torch.empty_like(x_TD)
        num_rows, num_features = x_TD.shape
        self._elementwise.add(
            out_TD.data_ptr(),
            x_TD.data_ptr(),
            y.data_ptr(),
            num_features * self._size if y.dim() == 2 else 0,
            num_rows,
            num_features,
        )
        return out_TD

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD = x_TD.contiguous()
        out_TD = torch.empty_like(x_TD)
        self._elementwise.rms_norm(
            out_TD.data_ptr(),
            x_TD.data_ptr(),
            0,
            0,
            weight_D.data_ptr(),
            x_TD.shape[0],
            x_TD.shape[1],
            eps,
        )
        return out_TD

    def add_rms_norm(
        self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x_TD, y_TD = x_TD.contiguous(), y_TD.contiguous()
        sum_TD = torch.empty_like(x_TD)
        out_TD = torch.empty_like(x_TD)
        self._elementwise.rms_norm(
            out_TD.data_ptr(),
            x_TD.data_ptr(),
            y_TD.data_ptr(),
            sum_TD.data_ptr(),
            weight_D.data_ptr(),
            x_TD.shape[0],
            x_TD.shape[1],
            eps,
        )
        return sum_TD, out_TD

    def silu_mul(self, gate_up_T2O: Tensor) -> Tensor:
        num_rows, num_columns = gate_up_T2O.shape
        gate_up_T2O = gate_up_T2O.contiguous()
        out_TO = gate_up_T2O.new_empty(num_rows, num_columns // 2)
        self._elementwise.silu_mul(
            out_TO.data_ptr(), gate_up_T2O.data_ptr(), num_rows, num_columns // 2
        )
        return out_TO

    def angles(
        self, positions_T: Tensor, frequencies_F: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        assert dtype == self._dtype
        num_tokens, num_frequencies = len(positions_T), len(frequencies_F)
        cos_T1F = torch.empty((num_tokens, 1, num_frequencies), dtype=dtype)
        sin_T1F = torch.empty_like(cos_T1F)
        self._angles(
            positions_T.contiguous().data_ptr(),
            frequencies_F.data_ptr(),
            cos_T1F.data_ptr(),
            sin_T1F.data_ptr(),
            num_tokens,
            num_frequencies,
        )
        return cos_T1F, sin_T1F

    def rotate(self, x_TMH: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
        num_rows, num_heads, head_dim = x_TMH.shape
        assert x_TMH.stride()[1:] == (head_dim, 1)
        self._elementwise.rotate(
            x_TMH.data_ptr(),
            x_TMH.stride(0) * self._size,
            cos_T1F.contiguous().data_ptr(),
            sin_T1F.contiguous().data_ptr(),
            num_rows,
            num_heads,
            head_dim // 2,
        )
