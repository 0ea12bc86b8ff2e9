"""Dicts of tensors and plain values, as one block of bytes and back."""

from typing import Any

import pytest
import torch

from aioengine.dist.tensor_dict import ALIGNMENT, pack, unpack

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(1.5, dtype=torch.float64),
        torch.arange(12, dtype=torch.int16).view(3, 4).t(),
        torch.empty(3, 0, 2, dtype=torch.complex64),
        torch.tensor([True, False, True]),
        torch.randn(7).to(torch.float8_e5m2),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)}",
)
def test_a_tensor_keeps_its_type_and_shape(x: torch.Tensor) -> None:
    found = unpack(pack({"before": torch.ones(1, dtype=torch.uint8), "x": x}, CPU))["x"]
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    assert found.is_contiguous()
    assert not found.requires_grad
    assert torch.equal(found, x)
    assert not x.numel() or found.storage_offset() * x.itemsize % ALIGNMENT == 0


def test_plain_values_and_order() -> None:
    values = {"z": None, "a": [1, (2.5, b"\0")], "m": {"": {"ü": True}}, "top": 2**64 - 1}
    found = unpack(pack(values, CPU))
    assert found == {**values, "a": [1, [2.5, b"\0"]]}
    assert list(found) == list(values)
    assert unpack(pack({}, CPU)) == {}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"a.b": {1, 2}}, "a.b: msgpack does not carry a set"),
        ({"a": [0, {"k": 1j}]}, r"a\[1\]\['k'\]: msgpack does not carry a complex"),
        ({"a": torch.float32}, "a: msgpack does not carry a dtype"),
        ({"a": [torch.ones(1)]}, r"a\[0\]: msgpack does not carry a Tensor"),
        ({"a": 2**64}, "a: msgpack does not carry 18446744073709551616"),
        ({"a": {1: 2}}, "a: the key 1 is a int"),
        ({1: 2}, "the key 1 is a int"),
        ({"a": torch.ones(2, device="meta")}, "a: a tensor on meta, in a group on cpu"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a: a torch.sparse_coo tensor"),
    ],
)
def test_what_cannot_travel_is_named(values: dict[Any, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        pack(values, CPU)
