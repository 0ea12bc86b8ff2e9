"""What layers are made of, apart from attention: one table of functions per kind of device.

Shapes: T tokens · I input features · O output features · D hidden size · M heads · H head_dim ·
F = H / 2.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.layers.quantized import (
    PackedParameter,
    Quantize,
    quantize_by_torch,
    quantized_linear,
)
from aioengine.layers.team import Team


@dataclass(frozen=True, slots=True)
class LayerBackend:
    """How one kind of device computes layers in one type: the seam."""

    embed: Callable[[Tensor, Tensor, int | None, torch.dtype], Tensor]
    """[T, D] of this type from ids [T] and a weight [O, D], packed or not: rows of the weight. Of
    which the first is that of this id, and ids of other rows give zeros; None: it has all rows."""
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """[T, O] from x [T, I], a weight [O, I] and a bias [O]."""
    logits: Callable[[Tensor, Tensor], Tensor]
    """Float32 [T, O] from x [T, I] and a weight [O, I]."""
    quantized_linear: Callable[[Tensor, PackedParameter, torch.dtype], Tensor]
    """[T, O] of this type from x [T, I] and a weight [O, I] in blocks."""
    quantize: Quantize
    side_by_side: Callable[[Sequence[Tensor]], Tensor]
    """[T, O] from the columns of several."""
    add: Callable[[Tensor, Tensor], Tensor]
    """x + y of [T, D] and [T, D] or [D], in the type of both."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """x / rms(x) · weight of [T, D], from the weight [D] and epsilon; the variance in float32."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """x + y, in the type of both, and its `rms_norm`, from x, y, the weight and epsilon."""
    silu_mul: Callable[[Tensor], Tensor]
    """silu(gate) · up, [T, O], of both side by side, [T, 2·O]."""
    angles: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    """Cosine and sine [T, 1, F] of this type from positions [T] and radians per position [F]."""
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    """Turns each pair (x[i], x[i + F]) of [T, M, H] by its angle, in place, from cosine and sine
    [T, 1, F]. Only the last two dimensions need be adjacent in memory."""


def _embed(ids_T: Tensor, weight: Tensor, first: int | None, dtype: torch.dtype) -> Tensor:
    if first is None:
        return _rows(ids_T, weight, dtype)
    rows_T = ids_T - first
    num_rows = weight.shape_OI[0] if isinstance(weight, PackedParameter) else len(weight)
    elsewhere_T = (rows_T < 0) | (rows_T >= num_rows)
    x_TD = _rows(rows_T.masked_fill(elsewhere_T, 0), weight, dtype)
    return x_TD.masked_fill(elsewhere_T[:, None], 0)


def _rows(rows_T: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, PackedParameter):
        return weight.rows(rows_T).to(dtype)
    return functional.embedding(rows_T, weight)


def _logits(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return functional.linear(x_TI, weight_OI).float()


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts), dim=1)


def _rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def _add_rms_norm(
    x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    sum_TD = x_TD + y_TD
    return sum_TD, _rms_norm(sum_TD, weight_D, eps)


def _silu_mul(gate_up_T2O: Tensor) -> Tensor:
    gate_TO, up_TO = gate_up_T2O.chunk(2, dim=-1)
    return functional.silu(gate_TO) * up_TO


def _angles(
    positions_T: Tensor, frequencies_F: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angles_T1F = positions_T.float()[:, None, None] * frequencies_F
    return angles_T1F.cos().to(dtype), angles_T1F.sin().to(dtype)


def _rotate(x_TMH: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
    first_TMF, second_TMF = x_TMH.chunk(2, dim=-1)
    turned_TMF = first_TMF * cos_T1F - second_TMF * sin_T1F
    second_TMF.copy_(second_TMF * cos_T1F + first_TMF * sin_T1F)
    first_TMF.copy_(turned_TMF)


TORCH: Final = LayerBackend(
    _embed,
    functional.linear,
    _logits,
    quantized_linear,
    quantize_by_torch,
    _side_by_side,
    torch.add,
    _rms_norm,
    _add_rms_norm,
    _silu_mul,
    _angles,
    _rotate,
)
"""Right on any device and for any type."""


def layer_backend(device_type: str, dtype: torch.dtype, team: Team | None = None) -> LayerBackend:
    """`device_type` as torch names it. On CPU compiled kernels, worked by this team, where there is
    one."""
    if device_type != "cpu" or team is None:
        return TORCH
    module = importlib.import_module("aioengine.layers.cpu_backend")
    if dtype not in module.KINDS:
        return TORCH
    cpu = module.CpuBackend(dtype, team)
    return LayerBackend(
        cpu.embed,
        cpu.linear,
        cpu.logits,
        cpu.quantized_linear,
        cpu.quantize,
        cpu.side_by_side,
        cpu.add,
        cpu.rms_norm,
        cpu.add_rms_norm,
        cpu.silu_mul,
        cpu.angles,
        cpu.rotate,
    )
