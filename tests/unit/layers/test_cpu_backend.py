"""Layers by compiled kernels against torch, in one shape and type after the other."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from aioengine.kernels import linear
from aioengine.kernels.codegen import BFLOAT16
from aioengine.kernels.dots import HAS_DOTS
from aioengine.kernels.team import Team
from aioengine.layers.backend import TORCH
from aioengine.layers.cpu_backend import CpuBackend, torch_rows
from aioengine.layers.memory import ParameterMemory
from aioengine.layers.quantized import PackedParameter
from aioengine.layers.quantized_format import INT4, INT4_FLOAT32, INT8
from aioengine.layers.rotary import rotary_frequencies
from aioengine.model_config import RopeConfig

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def exact(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    product_TO = x_TI.double() @ weight_OI.double().T
    return product_TO if bias_O is None else product_TO + bias_O.double()


@cache
def ours(dtype: torch.dtype, num_threads: int = 1) -> CpuBackend:
    """With products by our kernels even where the processor has better instructions."""
    backend = CpuBackend(dtype, Team(num_threads))
    backend._torch_rows = None
    return backend


@pytest.fixture(scope="module", autouse=True)
def ended_threads() -> Iterator[None]:
    """Teams end with the last reference to them."""
    yield
    ours.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [1, 5, 32, 172, 576, 1536, 2500])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(dtype: torch.dtype, num_inputs: int, has_bias: bool) -> None:
    """Any number of rows, inputs and outputs; what is rounded is rounded once."""
    for num_outputs in (1, 7, 48, 101):
        weight_OI = random(num_outputs, num_inputs, dtype=dtype)
        bias_O = random(num_outputs, dtype=dtype) if has_bias else None
        for num_rows in (1, 2, 3, 4, 5, 15, 16, 40):
            x_TI = random(num_rows, num_inputs, dtype=dtype)
            expected_TO = exact(x_TI, weight_OI, bias_O)
            found_TO = ours(dtype).linear(x_TI, weight_OI, bias_O)
            assert found_TO.dtype == dtype
            error = 1e-5 * num_inputs**0.5
            torch.testing.assert_close(
                found_TO.double(), expected_TO, rtol=torch.finfo(dtype).eps / 1.9, atol=error
            )
            if bias_O is None:
                logits_TO = ours(dtype).logits(x_TI, weight_OI)
                assert logits_TO.dtype == torch.float32
                torch.testing.assert_close(logits_TO.double(), expected_TO, rtol=0, atol=error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_batch_on_any_threads(dtype: torch.dtype) -> None:
    for num_inputs in (172, 1536, 4500):
        x_TI, weight_OI = random(300, num_inputs, dtype=dtype), random(101, num_inputs, dtype=dtype)
        whole_TO = ours(dtype).linear(x_TI, weight_OI, None)
        assert torch.equal(ours(dtype, 3).linear(x_TI, weight_OI, None), whole_TO)
        for first, last in ((0, 1), (0, 2), (1, 4), (3, 7), (5, 20), (9, 60), (280, 300)):
            part_TO = ours(dtype).linear(x_TI[first:last], weight_OI, None)
            assert torch.equal(part_TO, whole_TO[first:last])


@pytest.mark.skipif(not HAS_DOTS, reason="the other tests do the same")
def test_bfloat16_without_dot_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors that have none."""
    widening = linear._unpack_bfloat16, linear._multiply_bfloat16
    monkeypatch.setitem(linear._KERNELS, BFLOAT16, widening)
    backend = CpuBackend(torch.bfloat16, Team(1))
    for num_inputs in (172, 576):
        weight_OI = random(101, num_inputs, dtype=torch.bfloat16)
        x_TI = random(40, num_inputs, dtype=torch.bfloat16)
        found_TO = backend.logits(x_TI, weight_OI)
        expected_TO = exact(x_TI, weight_OI, None)
        torch.testing.assert_close(found_TO.double(), expected_TO, rtol=0, atol=3e-4)
        assert torch.equal(backend.logits(x_TI[:3], weight_OI), found_TO[:3])


def test_nothing_but_the_weight_is_read() -> None:
    """Behind and before it lie values that would show."""
    around = torch.full((3, 40, 172), torch.nan, dtype=torch.bfloat16)
    around[1] = random(40, 172, dtype=torch.bfloat16)
    for num_rows in (1, 5, 20):
        x_TI = random(num_rows, 172, dtype=torch.bfloat16)
        assert ours(torch.bfloat16).linear(x_TI, around[1], None).isfinite().all()


def test_a_row_of_nan_stays_alone() -> None:
    for num_rows in (4, 20):
        x_TI = random(num_rows, 64, dtype=torch.bfloat16)
        x_TI[2] = torch.nan
        found_TO = ours(torch.bfloat16).linear(x_TI, random(50, 64, dtype=torch.bfloat16), None)
        assert found_TO[2].isnan().all()
        assert found_TO.isfinite().all(dim=1).sum() == num_rows - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_features", [1, 8, 30, 576])
def test_norms_and_gates(dtype: torch.dtype, num_features: int) -> None:
    """As torch computes them in float32, rounded once."""
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    for num_rows, num_threads in ((1, 1), (70, 3)):
        x_TD, y_TD = (random(num_rows, num_features, dtype=dtype) for _ in range(2))
        y_TD = y_TD.flip(0)
        weight_D = random(num_features, dtype=dtype)
        cpu = ours(dtype, num_threads)
        norm_TD = cpu.rms_norm(x_TD, weight_D, 1e-5)
        expected_TD = TORCH.rms_norm(x_TD.float(), weight_D.float(), 1e-5)
        torch.testing.assert_close(norm_TD.float(), expected_TD, **tolerance)
        sum_TD, norm_TD = cpu.add_rms_norm(x_TD, y_TD, weight_D, 1e-5)
        assert torch.equal(sum_TD, x_TD + y_TD)
        expected_TD = TORCH.rms_norm(sum_TD.float(), weight_D.float(), 1e-5)
        torch.testing.assert_close(norm_TD.float(), expected_TD, **tolerance)
        gate_up_T2D = torch.cat((20 * x_TD, y_TD), dim=1)
        found_TD = cpu.silu_mul(gate_up_T2D)
        torch.testing.assert_close(
            found_TD.float(), TORCH.silu_mul(gate_up_T2D.float()), **tolerance
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80])
def test_rotation(dtype: torch.dtype, head_dim: int) -> None:
    """In place, of some heads among others."""
    for num_rows in (1, 70):
        qkv_TMH = random(num_rows, 7, head_dim, dtype=dtype)
        angles_T1F = 100 * random(num_rows, 1, head_dim // 2)
        cos, sin = angles_T1F.cos().to(dtype), angles_T1F.sin().to(dtype)
        expected_TMH = qkv_TMH.float()
        TORCH.rotate(expected_TMH[:, 1:5], cos.float(), sin.float())
        ours(dtype, 3).rotate(qkv_TMH[:, 1:5], cos, sin)
        tolerance = torch.finfo(dtype).eps
        torch.testing.assert_close(qkv_TMH.float(), expected_TMH, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    """Rows as torch takes them, to the last bit, and zeros for those that another rank has."""
    ids_T = torch.tensor([3, 49, 0, 20, 19, 21, 7] * 6)
    floats = random(50, 100)
    weights: list[Tensor] = [floats.to(dtype)]
    for stored in (INT8, INT4) if dtype != torch.float32 else (INT8, INT4, INT4_FLOAT32):
        packed = PackedParameter.empty(stored, (50, 100), ParameterMemory(torch.device("cpu")))
        packed.fill(floats)
        weights.append(packed)
    for weight in weights:
        for first, ids in ((None, ids_T), (0, ids_T + 5), (20, ids_T)):
            expected_TD = TORCH.embed(ids, weight, first, dtype)
            assert torch.equal(ours(dtype, 3).embed(ids, weight, first, dtype), expected_TD)


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles(dtype: torch.dtype) -> None:
    """The nearest float32, at any position."""
    frequencies_F = rotary_frequencies(RopeConfig(), 62)
    positions_T = torch.cat((torch.arange(100), torch.tensor([2047, 131071, 10_000_000])))
    angles_T1F = (positions_T.float()[:, None, None] * frequencies_F).double()
    cos, sin = ours(dtype, 3).angles(positions_T, frequencies_F, dtype)
    for found, exact in ((cos, angles_T1F.cos()), (sin, angles_T1F.sin())):
        torch.testing.assert_close(found, exact.float().to(dtype), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_side_by_side(dtype: torch.dtype) -> None:
    parts = random(70, 57, dtype=dtype).split_with_sizes((1, 16, 40), dim=1)
    assert torch.equal(ours(dtype, 3).side_by_side(parts), torch.cat(parts, dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: torch.dtype) -> None:
    x_TD, bias_D = random(70, 57, dtype=dtype), random(57, dtype=dtype)
    for y in (x_TD.flip(0), bias_D):
        assert torch.equal(ours(dtype, 3).add(x_TD, y), x_TD + y)


def test_who_computes_follows_from_the_processor() -> None:
    assert torch_rows(torch.float32, {"+avx512bf16"}) is None
    assert torch_rows(torch.bfloat16, {"+avx2", "-avx512bf16"}) is None
    assert torch_rows(torch.bfloat16, {"+avx512bf16"}) is None
    assert torch_rows(torch.bfloat16, {"+avx512bf16", "+amx-bf16"}) == 16
    assert torch_rows(torch.float16, {"+avx512bf16"}) is None
