"""Linear layers: published parts in one product, and tied weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.embedding import LMHead, VocabParallelEmbedding
from aioengine.layers.linear import ColumnParallelLinear
from aioengine.layers.memory import ParameterMemory
from aioengine.layers.module import Placement
from aioengine.layers.partition import split_even
from aioengine.layers.quantized import PackedParameter
from aioengine.layers.quantized_format import INT4, INT8

CPU = torch.device("cpu")


def place(dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(GroupCoordinator("tp", (0,), 0, device=CPU), dtype, ParameterMemory(CPU))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(6, 2, 2), (16, 16), (5,)])
def test_parts_are_filled_in_place(sizes: tuple[int, ...], bias: bool) -> None:
    """By a loader or by a trainer: the product has no copy of them."""
    shards = {f"part{i}": split_even(size, 0, 1, dim=0) for i, size in enumerate(sizes)}
    fused = ColumnParallelLinear(24, shards, bias=bias, place=place())
    owner = nn.ModuleDict(dict(zip(shards, fused.parts, strict=True)))
    assert len(list(owner.parameters())) == len(sizes) * (1 + bias)
    assert sum(p.nbytes for p in owner.parameters()) == sum(sizes) * (24 + bias) * 4
    x_TI = torch.randn(3, 24)
    for _ in range(2):
        for parameter in owner.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        apart = [linear(x_TI, part.weight, part.bias) for part in fused.parts]
        torch.testing.assert_close(fused(x_TI), torch.cat(apart, dim=1))


def test_neighbours_of_one_format_are_one_product() -> None:
    """And all outputs stand side by side, in the order of the parts."""
    formats = {"a.weight": INT4, "b.weight": INT4, "c.weight": INT8, "e.weight": INT8}
    shards = {
        name: split_even(size, 0, 1, dim=0)
        for name, size in zip("abcde", (16, 32, 5, 7, 3), strict=True)
    }
    fused = ColumnParallelLinear(32, shards, bias=False, place=replace(place(), formats=formats))
    for part in fused.parts:
        values_OI = torch.randn(part.shards["weight"].full_size, 32)
        if isinstance(part.weight, PackedParameter):
            part.weight.fill(values_OI)
        else:
            part.weight.copy_(values_OI)
    a, b = fused.parts[:2]
    assert isinstance(a.weight, PackedParameter)
    assert a.weight.untyped_storage().data_ptr() == b.weight.untyped_storage().data_ptr()
    x_TI = torch.randn(3, 32)
    apart = [
        linear(x_TI, p.weight.dequantize() if isinstance(p.weight, PackedParameter) else p.weight)
        for p in fused.parts
    ]
    torch.testing.assert_close(fused(x_TI), torch.cat(apart, dim=1))


def test_a_tied_head_has_the_weight_of_the_embedding() -> None:
    def logits(tied: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        embedding = VocabParallelEmbedding(40, 24, place=place(torch.bfloat16))
        head = LMHead(40, 24, tied_to=embedding if tied else None, place=place(torch.bfloat16))
        head.weight.fill_(0.0)
        embedding.weight.copy_(torch.randn(40, 24))
        x_RD = torch.randn(2, 24).bfloat16()
        return head(x_RD), linear(x_RD.float(), embedding.weight.float())

    found_RV, expected_RV = logits(tied=True)
    assert found_RV.dtype == torch.float32
    torch.testing.assert_close(found_RV, expected_RV, rtol=1e-2, atol=1e-2)
    assert not logits(tied=False)[0].any()
