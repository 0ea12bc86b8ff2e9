"""Run by test_collectives.py on 8 ranks: backends through the custom ops, against sums and joins
that each rank computes alone. Arguments: names of backends, each first in its groups' chains.

Sums are expected to be bitwise those of a float32 sum (integers and float64: in their own type) in
rank order, rounded once. So they are equal across ranks and runs, and within 1 ulp of the exact sum
of half types.
"""

import logging
import sys
from collections.abc import Callable

import pytest
import torch
from support.ranks import HOST, TIMEOUT_S, agree_on_port, rank_of_this_process
from torch import Tensor
from torch.distributed import destroy_process_group, init_process_group

from aioengine.dist import ops
from aioengine.dist.groups import GroupCoordinator
from aioengine.dist.process_groups import NcclBackend
from aioengine.dist.worlds import GroupBuilder, GroupOptions, ServedStore, connect_store
from aioengine.errors import EngineError

WORLD = range(8)
LINES = {
    "two": [(0, 1), (2, 3)],
    "three": [(4, 5, 6), (0, 1, 2)],
    "four": [(0, 2, 4, 6), (1, 3, 5, 7)],
    "eight": [tuple(WORLD)],
}
"""Groups run beside each other, in one order on all ranks."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
LARGE = 300_007
"""Values: more than one piece in every backend, not divisible by any number of ranks."""

Views = dict[str, Callable[[Tensor], Tensor]]
STRIDED: Views = {
    "transposed": lambda x: x.t(),
    "every other": lambda x: x[::2, 1:],
    "repeated": lambda x: x[:1].expand(3, -1),
}


def parts_of(shape: tuple[int, ...], dtype: torch.dtype, num_ranks: int) -> list[Tensor]:
    """What each rank contributes: of all magnitudes and signs; whole ranges of integers."""
    generator = torch.Generator().manual_seed(hash((shape, num_ranks)) % 2**31)
    if dtype in FLOATS:
        drawn = torch.randn(num_ranks, *shape, generator=generator)
        drawn *= torch.randint(1, 1000, drawn.shape, generator=generator)
        return list(drawn.to(dtype))
    bounds = torch.iinfo(dtype)
    drawn = torch.randint(
        bounds.min // num_ranks, bounds.max // num_ranks, (num_ranks, *shape), generator=generator
    )
    return list(drawn.to(dtype))


def rank_order_sum(parts: list[Tensor]) -> Tensor:
    is_half = parts[0].dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if is_half else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def check_same(found: Tensor, expected: Tensor, x: Tensor) -> None:
    """Bitwise, and new memory as a model's next layer wants it."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert not x.numel() or found.data_ptr() != x.data_ptr()
    bits, wanted = (y.reshape(-1).view(torch.uint8) for y in (found, expected.contiguous()))
    assert torch.equal(bits, wanted), (found, expected)


def check_operations(group: GroupCoordinator, parts: list[Tensor]) -> None:
    """All of them, on every dimension, twice."""
    n, me = group.world_size, group.rank_in_group
    x = parts[me]
    before = x.clone()
    total = rank_order_sum(parts)
    for _ in range(2):
        check_same(group.all_reduce(x), total, x)
        for dim in range(-x.dim(), x.dim()):
            check_same(group.all_gather(x, dim), torch.cat(parts, dim), x)
            if x.shape[dim] % n == 0:
                mine = total.tensor_split(n, dim)[me]
                check_same(group.reduce_scatter(x, dim), mine, x)
        assert torch.equal(x, before), "collectives leave their input alone"
    source = n - 1
    y = x.clone(memory_format=torch.preserve_format)
    assert group.broadcast(y, source) is y
    assert torch.equal(y, parts[source])


def check_types_and_shapes(group: GroupCoordinator) -> None:
    n = group.world_size
    for dtype in (*FLOATS, *INTEGERS):
        check_operations(group, parts_of((2, 3 * n), dtype, n))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in [(), (0,), (1,), (5,), (2, 0, 3), (n, 2, 2 * n), (LARGE,)]:
            check_operations(group, parts_of(shape, dtype, n))
        check_operations(group, parts_of((3, n * 1001), dtype, n))
        for view in STRIDED.values():
            parts = [view(part) for part in parts_of((n * 2, 2 * n + 1), dtype, n)]
            check_operations(group, parts)


def check_other_types(group: GroupCoordinator) -> None:
    """What cannot be summed can still be moved."""
    flags = [torch.arange(6) % (rank + 2) == 0 for rank in range(group.world_size)]
    mine = flags[group.rank_in_group]
    assert torch.equal(group.all_gather(mine, 0), torch.cat(flags))
    with pytest.raises(EngineError, match=r"all_reduce: none of .* takes torch\.bool"):
        group.all_reduce(mine)
    tiny = mine.to(torch.float8_e4m3fn)
    assert torch.equal(group.all_gather(tiny, 0).float(), torch.cat(flags).float())


def check_nccl_shapes(group: GroupCoordinator) -> None:
    """NCCL's backend does to shapes what it should; here over gloo, which knows the same calls."""
    nccl = NcclBackend(group.device_group)
    n, me = group.world_size, group.rank_in_group
    parts = [part.transpose(0, 2) for part in parts_of((n, 2, n), torch.int64, n)]
    total = rank_order_sum(parts)
    check_same(nccl.all_reduce(parts[me]), total, parts[me])
    for dim in (0, 2):
        check_same(nccl.all_gather(parts[me], dim), torch.cat(parts, dim), parts[me])
        mine = total.tensor_split(n, dim)[me]
        check_same(nccl.reduce_scatter(parts[me], dim), mine, parts[me])
    for op in (nccl.all_gather, nccl.reduce_scatter):
        assert op(torch.empty(n, 0), 1).numel() == 0
    assert nccl.all_reduce(torch.empty(0)).shape == (0,)


def operations(group: GroupCoordinator) -> Callable[[Tensor], Tensor]:
    def layer(x: Tensor) -> Tensor:
        joined = group.all_gather(group.all_reduce(x + 1) * 2, 1)
        return group.reduce_scatter(joined, -1).relu()

    return layer


def check_compiled(group: GroupCoordinator) -> None:
    """One graph, with shapes from the fake kernels, also when these are symbols."""
    layer = operations(group)
    for dtype, dynamic in ((torch.float32, False), (torch.bfloat16, True)):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for num_rows in (2, 5) if dynamic else (2,):
            x = parts_of((num_rows, 6), dtype, group.world_size)[group.rank_in_group]
            check_same(compiled(x), layer(x), x)


def check_schemas(group: GroupCoordinator) -> None:
    """torch's own checks of custom ops: schema, fake kernels against real ones, tracing."""
    x = torch.randn(4, 6)
    for op, arguments in (
        (ops.all_reduce, (x.t(), group.name)),
        (ops.all_gather, (x, 1, group.name)),
        (ops.reduce_scatter, (x, -1, group.name)),
    ):
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op, arguments, test_utils=tests)


def check_backend(backend: str, rank: int) -> None:
    options = GroupOptions(
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
        num_local_ranks=len(WORLD),
        custom_all_reduce=backend != "gloo",
    )
    builder = GroupBuilder(WORLD, rank, options)
    built = [builder.build(axis, lines) for axis, lines in LINES.items()]
    groups = [group for group in built if group is not None]
    for group in groups:
        assert group.communicator.names[0] == backend
        group.exercise([])
        check_types_and_shapes(group)
        check_other_types(group)
    if rank in LINES["two"][0]:
        check_compiled(groups[0])
        check_schemas(groups[0])
        check_nccl_shapes(groups[0])
    for group in groups:
        group.close()


def main() -> None:
    rank = rank_of_this_process()
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    torch.set_num_threads(1)
    stores = [ServedStore(HOST)] if rank == 0 else []
    port = agree_on_port(lambda: stores[0].port)
    store = stores[0] if stores else connect_store(HOST, port, TIMEOUT_S)
    init_process_group("gloo", store=store, rank=rank, world_size=len(WORLD))
    for backend in sys.argv[1:]:
        check_backend(backend, rank)
    destroy_process_group()


if __name__ == "__main__":
    main()
