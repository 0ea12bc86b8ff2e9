"""Weights in 8 and 4 bits: what they are rounded to, how they lie, what is computed with them."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from aioengine.layers.backend import TORCH, layer_backend
from aioengine.layers.memory import ParameterMemory
from aioengine.layers.quantized import PackedParameter, packed_parts
from aioengine.layers.quantized_format import (
    GROUP,
    INT4,
    INT4_FLOAT32,
    INT8,
    Format,
    Groups,
    quantize,
)
from aioengine.layers.team import open_team

CPU = torch.device("cpu")
FORMATS = [INT8, INT4, INT4_FLOAT32]
SHAPES = [(48, 64), (37, 100), (1, 32), (16, 3)]


def filled(
    stored: Format, shape: tuple[int, int], weight_OI: Tensor | None = None
) -> PackedParameter:
    """With random weights unless they are given."""
    parameter = PackedParameter.empty(stored, shape, ParameterMemory(CPU))
    if weight_OI is None:
        weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parameter.fill(weight_OI)
    return parameter


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.name)
def test_round_trip(stored: Format, shape: tuple[int, int]) -> None:
    """Blocks say what was put into them; the nearest code is at most half a step away."""
    parameter = filled(stored, shape)
    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values_OI = parameter.dequantize()
    assert values_OI.shape == shape
    assert parameter.shape == stored.packed_shape(*shape)
    groups = quantize(weight_OI, stored)
    assert torch.equal(values_OI, groups.dequantize()[:, : shape[1]])
    if stored is INT8:
        steps_OG = groups.scales_OG.float()
        steps_OI = steps_OG.repeat_interleave(GROUP, dim=1)[:, : shape[1]]
        assert ((values_OI - weight_OI).abs() <= 0.51 * steps_OI).all()


def test_the_search_for_scales_beats_plain_rounding() -> None:
    weight_OI = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    low_OG1, high_OG1 = (
        each[..., None] for each in torch.aminmax(weight_OI.view(256, -1, GROUP), dim=-1)
    )
    step_OG1 = (high_OG1 - low_OG1) / 15
    offsets_OGK = (weight_OI.view(256, -1, GROUP) - low_OG1) / step_OG1
    plain_OI = (offsets_OGK.round() * step_OG1 + low_OG1).flatten(1)
    searched_OI = quantize(weight_OI, INT4).dequantize()
    plain, searched = (relative_error(each, weight_OI) for each in (plain_OI, searched_OI))
    assert searched < 0.95 * plain


@pytest.mark.parametrize("stored", [INT8, INT4], ids=lambda each: each.name)
def test_what_is_quantised_already_stays(stored: Format) -> None:
    """Zeros and equal weights, too."""
    weight_OI = filled(stored, (32, 64)).dequantize()
    weight_OI[3] = 0.0
    weight_OI[4] = 0.25
    again_OI = quantize(weight_OI, stored).dequantize()
    torch.testing.assert_close(again_OI, weight_OI, rtol=2e-3, atol=2e-3)
    assert not again_OI[3].any()


@pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.name)
def test_rows_are_looked_up(stored: Format) -> None:
    parameter = filled(stored, (37, 100))
    ids_T = torch.tensor([0, 36, 16, 15, 36])
    assert torch.equal(parameter.rows(ids_T), parameter.dequantize()[ids_T])


def test_what_is_missing_is_zero() -> None:
    """A trailing rank of a tp group has fewer rows and columns than room."""
    parameter = PackedParameter.empty(INT4, (40, 96), ParameterMemory(CPU))
    parameter.data.fill_(255)
    parameter.fill(torch.ones(20, 64))
    values_OI = parameter.dequantize()
    assert (values_OI[:20, :64] == 1).all()
    assert not values_OI[20:].any()
    assert not values_OI[:, 64:].any()


def test_floats_cannot_be_copied_in_by_mistake() -> None:
    parameter = filled(INT8, (48, 64))
    with pytest.raises(RuntimeError):
        parameter.copy_(torch.randn(48, 64))


def test_parts_are_views() -> None:
    whole, parts = packed_parts(INT4, [32, 16, 5], 64, ParameterMemory(CPU))
    for part in parts:
        part.fill(torch.randn(part.shape_OI))
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels(num_threads: int, dtype: torch.dtype) -> None:
    """Of all formats: as torch's product with the dequantised weights, for odd shapes and any
    number of rows. In float32 to rounding; in half types x becomes 8 bits on some processors."""
    team = open_team(num_threads)
    assert team is not None
    kernels = layer_backend("cpu", dtype, team)
    limit = 2e-6 if dtype == torch.float32 else 0.015
    for stored in (INT8, INT4, INT4_FLOAT32) if dtype == torch.float32 else (INT8, INT4):
        for shape in [(48, 96), (37, 100), (200, 33)]:
            weight = filled(stored, shape)
            x_TI = torch.randn(300, shape[1]).to(dtype)
            expected_TO = TORCH.quantized_linear(x_TI, weight, torch.float32)
            torch.testing.assert_close(
                expected_TO, linear(x_TI.float(), weight.dequantize()), rtol=0, atol=0
            )
            all_TO = kernels.quantized_linear(x_TI, weight, torch.float32)
            assert relative_error(all_TO, expected_TO) < limit
            for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 70, 129):
                found_TO = kernels.quantized_linear(x_TI[:num_rows], weight, dtype)
                assert torch.equal(found_TO, all_TO[:num_rows].to(dtype))  # rows are independent
    team.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.name)
def test_kernels_quantise(stored: Format, dtype: torch.dtype) -> None:
    """8 bits as torch does, 4 bits better; what is quantised already stays; what is missing becomes
    zero."""
    team = open_team(2)
    quantize_by_kernels = layer_backend("cpu", torch.bfloat16, team).quantize
    for shape in SHAPES:
        weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected_OI = filled(stored, shape, weight_OI).dequantize()
        parameter = PackedParameter.empty(stored, shape, ParameterMemory(CPU), quantize_by_kernels)
        parameter.fill(weight_OI)
        values_OI = parameter.dequantize()
        if stored is INT8:
            assert torch.equal(values_OI, expected_OI)
        else:
            limit = relative_error(expected_OI, weight_OI)
            assert relative_error(values_OI, weight_OI) <= 1.001 * limit
        parameter.fill(values_OI)
        assert relative_error(parameter.dequantize(), values_OI) < 0.002
    parameter = PackedParameter.empty(stored, (40, 96), ParameterMemory(CPU), quantize_by_kernels)
    parameter.data.fill_(255)
    parameter.fill(torch.ones(20, 64, dtype=dtype))
    values_OI = parameter.dequantize()
    torch.testing.assert_close(values_OI[:20, :64], torch.ones(20, 64), rtol=1e-3, atol=0)
    assert not values_OI[20:].any()
    assert not values_OI[:, 64:].any()
    assert team is not None
    team.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, value: float) -> None:
    """And in its row."""
    team = open_team(1)
    weight = filled(INT8, (48, 64))
    x_TI = torch.randn(3, 64).to(dtype)
    x_TI[1, 5] = value
    out_TO = layer_backend("cpu", dtype, team).quantized_linear(x_TI, weight, dtype)
    assert out_TO.isfinite().all(1).tolist() == [True, False, True]


def test_groups_are_cut() -> None:
    groups = quantize(torch.randn(16, 128), INT4)
    values_OI = groups.dequantize()
    cut = groups.columns(1, 3).rows(torch.tensor([2, 0]))
    assert isinstance(cut, Groups)
    assert torch.equal(cut.dequantize(), values_OI[[2, 0], 32:96])
