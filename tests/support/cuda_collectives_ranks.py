"""Run by tests/gpu/test_collectives.py on 2 ranks: a tp group on CUDA, each of its backends."""

import logging

import torch
from support.ranks import HOST, TIMEOUT_S, agree_on_port, rank_of_this_process
from torch import Tensor
from torch.distributed import PrefixStore

from aioengine.dist.groups import GroupCoordinator
from aioengine.dist.symmetric_memory import MAX_BYTES, ONE_SHOT_BYTES
from aioengine.dist.worlds import GroupOptions, ServedStore, connect_store, open_replica_groups
from aioengine.layout import ParallelLayout

NUM_RANKS = 2
NUM_BYTES = (16, 20, ONE_SHOT_BYTES, ONE_SHOT_BYTES + 16, MAX_BYTES, MAX_BYTES + 16)


def whole_numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """So small that their sums are exact in every type."""
    return (
        (torch.arange(torch.Size(shape).numel(), device="cuda") % 50 + rank).view(shape).to(dtype)
    )


def check_operations(group: GroupCoordinator, dtype: torch.dtype) -> None:
    me = group.rank_in_group
    for num_bytes in NUM_BYTES:
        parts = [
            whole_numbers(rank, (num_bytes // dtype.itemsize,), dtype) for rank in range(NUM_RANKS)
        ]
        for _ in range(3):
            assert torch.equal(group.all_reduce(parts[me]), parts[0] + parts[1])
        assert torch.equal(group.all_gather(parts[me], 0), torch.cat(parts))
    matrices = [whole_numbers(rank, (6, 8), dtype).t() for rank in range(NUM_RANKS)]
    total = matrices[0] + matrices[1]
    assert torch.equal(group.all_reduce(matrices[me]), total)
    assert torch.equal(group.reduce_scatter(matrices[me], 1), total.chunk(NUM_RANKS, 1)[me])
    assert torch.equal(group.broadcast(matrices[me].clone(), 1), matrices[1])


def check_graph(group: GroupCoordinator) -> None:
    """A captured graph sums what its input holds at each replay."""
    x = torch.ones(64, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = group.all_reduce(x)
    for value in range(5):
        x.fill_(value)
        graph.replay()
        assert torch.equal(total, torch.full_like(x, NUM_RANKS * value))


def check_tensor_dict(group: GroupCoordinator) -> None:
    values = {"device": torch.arange(5, device="cuda"), "host": torch.arange(3), "n": 1}
    if group.rank_in_group == 0:
        group.isend_tensor_dict(values, 1).wait()
    else:
        found = group.irecv_tensor_dict(0).wait()
        assert found["n"] == 1
        for name in ("device", "host"):
            assert found[name].device.type == values[name].device.type
            assert torch.equal(found[name], values[name])


def main() -> None:
    rank = rank_of_this_process()
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    torch.cuda.set_device(rank)
    stores = [ServedStore(HOST)] if rank == 0 else []
    port = agree_on_port(lambda: stores[0].port)
    store = stores[0] if stores else connect_store(HOST, port, TIMEOUT_S)
    for custom_all_reduce in (True, False):
        options = GroupOptions(
            device=torch.device("cuda", rank),
            timeout_s=TIMEOUT_S,
            custom_all_reduce=custom_all_reduce,
        )
        own_store = PrefixStore(f"custom {custom_all_reduce}", store)
        groups = open_replica_groups(ParallelLayout(tp_size=NUM_RANKS), rank, own_store, options)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            check_operations(groups.tp, dtype)
        check_graph(groups.tp)
        check_tensor_dict(groups.tp)
        groups.close()


if __name__ == "__main__":
    main()
