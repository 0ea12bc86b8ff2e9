"""What CUDA symmetric memory takes and when it stays away; its kernels need CUDA."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aioengine.dist.symmetric_memory import (
    MAX_BYTES,
    ONE_SHOT_BYTES,
    SymmetricMemoryBackend,
    refuse_places,
)


def backend() -> SymmetricMemoryBackend:
    return SymmetricMemoryBackend(torch.empty(MAX_BYTES, dtype=torch.uint8, device="meta"), "0")


@pytest.mark.parametrize(
    ("num_values", "dtype", "accepted"),
    [
        (4, torch.float32, True),
        (8, torch.bfloat16, True),
        (MAX_BYTES // 4, torch.float32, True),
        (MAX_BYTES // 4 + 4, torch.float32, False),  # beyond the buffer
        (0, torch.float32, False),
        (5, torch.float32, False),  # no whole 16-byte words
        (4, torch.bfloat16, False),
        (8, torch.float16, False),  # no kernel
        (8, torch.int64, False),
    ],
)
def test_what_it_takes(num_values: int, dtype: torch.dtype, accepted: bool) -> None:
    with FakeTensorMode():
        x = torch.empty(num_values, dtype=dtype, device="cuda")
    assert backend().accepts("all_reduce", x) == accepted
    assert not backend().accepts("all_gather", x)
    assert not backend().accepts("broadcast", x)
    assert not backend().accepts("all_reduce", torch.empty(num_values, dtype=dtype))


@pytest.mark.parametrize("num_bytes", [16, ONE_SHOT_BYTES, ONE_SHOT_BYTES + 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_is_new_and_dense(num_bytes: int, dtype: torch.dtype) -> None:
    """On torch's shape functions of the kernels, which check names and arguments, too."""
    kernels = torch.library.Library("symm_mem", "IMPL")  # this kernel comes without one
    kernels.impl("two_shot_all_reduce_out", lambda x, reduce_op, group_name, output: output, "Meta")
    x = torch.empty(2, num_bytes // dtype.itemsize // 2, dtype=dtype, device="meta").t()
    total = backend().all_reduce(x)
    assert total.shape == x.shape
    assert total.dtype == dtype
    assert total.is_contiguous()


@pytest.mark.parametrize(
    ("places", "refusal"),
    [
        ([("0", 0), ("0", 1)], None),
        ([("a", rank) for rank in range(8)], None),
        ([("0", 0), ("1", 1)], "several nodes"),
        ([("0", 0), ("0", 0)], "do not see each other's devices"),
        ([("0", 0), ("0", 1), ("0", 2)], r"3 ranks, and only for \(2, 4, 8\)"),
    ],
)
def test_where_it_stays_away(places: list[tuple[str, int]], refusal: str | None) -> None:
    found = refuse_places(places)
    assert (found is None) == (refusal is None)
    assert refusal is None or re.search(refusal, found or "")
