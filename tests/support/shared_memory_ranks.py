"""Run by test_shared_memory.py on 8 ranks: every operation in groups of 2, 3, 4 and 8 of them.

Every rank makes the inputs of all, so that it can work out for itself what it must get.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from support.ranks import rank_of_this_process
from torch import Tensor

from aioengine.dist import shared_memory
from aioengine.dist.communicators import Operation
from aioengine.dist.shared_memory import SharedMemoryBackend, open_shared_memory
from aioengine.errors import EngineError

GROUPS = [[(0, 1), (2, 3, 4), (5, 6)], [(0, 1, 2, 3), (4, 5, 6, 7)], [tuple(range(8))]]
"""Groups that run at the same time, in rounds; rank 7 sits out the first."""
SLOT_BYTES = 8192
ONE_PHASE_BYTES = 2048
"""Small, so that small tensors cover one phase, two, and several chunks."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SUMMABLE = (*FLOATS, torch.int32, torch.int64)
MOVABLE = (*SUMMABLE, torch.bool, torch.uint8, torch.float64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make(shape: Sequence[int], dtype: torch.dtype, seed: int, rank: int) -> Tensor:
    """Numbers of all magnitudes, and in the floating types NaN, infinities and subnormals too."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype not in FLOATS:
        info = None if dtype in (torch.bool, torch.float64) else torch.iinfo(dtype)
        low, high = (0, 2) if info is None else (max(info.min // 8, -(2**59)), info.max // 8)
        return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)
    x = torch.randn(tuple(shape), generator=generator)
    x = x * torch.exp2(torch.randint(-8, 8, tuple(shape), generator=generator).float())
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-41, 6e-8])
    which = torch.randint(0, 200, tuple(shape), generator=generator)
    x = torch.where(which < 6, special[which.clamp(max=5)], x).to(dtype)
    if dtype.itemsize == 2:  # NaNs with every bit set, and one that signals
        bits(x)[which == 6] = 0x7FFF
        bits(x)[which == 7] = -0x7F
    return x


def add_up(inputs: list[Tensor]) -> Tensor:
    """The definition: a float32 sum in rank order, rounded once; integers exactly."""
    if inputs[0].dtype not in FLOATS:
        return torch.stack(inputs).sum(0, dtype=inputs[0].dtype)
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    return total.to(inputs[0].dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.itemsize])


def same(x: Tensor, y: Tensor) -> bool:
    """Bit by bit; any NaN equals any other."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    is_nan = x.isnan() & y.isnan()
    return bool(((bits(x) == bits(y)) | is_nan).all())


class Check:
    """One backend against the definition; `digest` is of all results that must be equal."""

    def __init__(self, backend: SharedMemoryBackend, own: int, size: int) -> None:
        self._backend = backend
        self._own = own
        self._size = size
        self._seed = 0
        self.digest = hashlib.sha256()

    def _inputs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        self._seed += 1
        return [make(shape, dtype, self._seed, rank) for rank in range(self._size)]

    def all_reduce(self, shape: Sequence[int], dtype: torch.dtype, *, transposed: bool) -> None:
        inputs = self._inputs(shape, dtype)
        expected = add_up(inputs)
        x = inputs[self._own]
        if transposed:  # the same numbers, elsewhere in memory
            x = x.mT.contiguous().mT
        before = x.clone()
        result, again = self._backend.all_reduce(x), self._backend.all_reduce(x)
        assert same(result, expected), (shape, dtype)
        assert torch.equal(bits(result), bits(again)), (shape, dtype)
        assert torch.equal(bits(x), bits(before)), "inputs stay as they are"
        self.digest.update(bits(result).numpy().tobytes())

    def all_gather(self, shape: Sequence[int], dtype: torch.dtype, dim: int) -> None:
        inputs = self._inputs(shape, dtype)
        result = self._backend.all_gather(inputs[self._own], dim)
        assert same(result, torch.cat(inputs, dim)), (shape, dtype, dim)
        self.digest.update(bits(result).numpy().tobytes())

    def reduce_scatter(self, shape: Sequence[int], dtype: torch.dtype, dim: int) -> None:
        shape = list(shape)
        shape[dim] *= self._size
        inputs = self._inputs(shape, dtype)
        expected = add_up(inputs).chunk(self._size, dim)[self._own]
        result = self._backend.reduce_scatter(inputs[self._own], dim)
        assert same(result, expected), (shape, dtype, dim)
        assert result.is_contiguous()

    def broadcast(self, shape: Sequence[int], dtype: torch.dtype, *, transposed: bool) -> None:
        inputs = self._inputs(shape, dtype)
        source = self._seed % self._size
        x = inputs[self._own].clone()
        if transposed:
            x = x.mT.contiguous().mT
        self._backend.broadcast(x, source)
        assert same(x, inputs[source]), (shape, dtype, source)


def shapes(dtype: torch.dtype, size: int) -> Iterator[tuple[int, ...]]:
    """Around the limits of one phase, of a part of a chunk, and of one chunk and several."""
    yield from ((), (1,), (0,), (3, 0, 2), (5, 33), (2, 3, 7))
    for num_bytes in (ONE_PHASE_BYTES, SLOT_BYTES, 3 * SLOT_BYTES, 128 * size):
        yield from ((num_bytes // dtype.itemsize + extra,) for extra in (-1, 0, 1))


def check_everything(check: Check, size: int) -> None:
    for dtype in SUMMABLE:
        for shape in shapes(dtype, size):
            check.all_reduce(shape, dtype, transposed=len(shape) > 1)
        for shape in ((1,), (7,), (0, 3), (5, 33), (2, 3, 700)):
            for dim in range(len(shape)):
                check.reduce_scatter(shape, dtype, dim)
    for dtype in MOVABLE:
        for shape in ((1,), (7,), (0, 3), (5, 33), (2, 3, 700), (SLOT_BYTES + 1,)):
            for dim in range(len(shape)):
                check.all_gather(shape, dtype, dim)
            check.broadcast(shape, dtype, transposed=len(shape) > 1)
        check.broadcast((), dtype, transposed=False)


def check_large(check: Check) -> None:
    """With slots as they are in use, a few."""
    for dtype in (torch.float32, torch.bfloat16):
        check.all_reduce((shared_memory.SLOT_BYTES // dtype.itemsize + 1,), dtype, transposed=False)


def open_group(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> SharedMemoryBackend:
    rank = rank_of_this_process()
    backend = open_shared_memory(
        group,
        group=f"test:{len(ranks)}",
        ranks=ranks,
        rank=rank,
        node="0",
        num_local_ranks=dist.get_world_size(),
        timeout_s=60.0,
    )
    assert isinstance(backend, SharedMemoryBackend), backend
    return backend


def check_what_is_accepted(backend: SharedMemoryBackend) -> None:
    for operation in get_args(Operation):
        is_sum = operation in ("all_reduce", "reduce_scatter")
        for dtype in MOVABLE:
            x = torch.zeros(2, dtype=dtype)
            assert backend.accepts(operation, x) == (not is_sum or dtype in SUMMABLE)
        assert not backend.accepts(operation, torch.zeros(2, device="meta"))


def main() -> None:
    dist.init_process_group("gloo")
    rank = rank_of_this_process()
    sizes = (shared_memory.SLOT_BYTES, shared_memory.ONE_PHASE_BYTES)
    for round_of_groups in GROUPS:
        for ranks in round_of_groups:
            group = dist.new_group(list(ranks))
            if rank not in ranks:
                continue
            shared_memory.SLOT_BYTES, shared_memory.ONE_PHASE_BYTES = SLOT_BYTES, ONE_PHASE_BYTES
            backend = open_group(group, ranks)
            check = Check(backend, ranks.index(rank), len(ranks))
            check_everything(check, len(ranks))
            check_what_is_accepted(backend)
            backend.close()
            backend.close()
            with pytest.raises(EngineError, match="closed"):
                backend.all_reduce(torch.zeros(1))
            shared_memory.SLOT_BYTES, shared_memory.ONE_PHASE_BYTES = sizes
            if len(ranks) == 2:
                with_large_slots = open_group(group, ranks)
                check_large(Check(with_large_slots, ranks.index(rank), len(ranks)))
                with_large_slots.close()
            digests = [torch.empty(32, dtype=torch.uint8) for _ in ranks]
            mine = torch.frombuffer(bytearray(check.digest.digest()), dtype=torch.uint8)
            dist.all_gather(digests, mine, group=group)
            assert all(torch.equal(digest, mine) for digest in digests), "results differ by rank"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
