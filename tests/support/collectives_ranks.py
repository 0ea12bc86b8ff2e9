"""Run by test_groups.py on the 4 ranks of a 2 × 2 replica: every operation of its groups."""

import logging

import pytest
import torch
from support.ranks import HOST, TIMEOUT_S, agree_on_port, rank_of_this_process

from aioengine.dist.groups import (
    GroupCoordinator,
    ReplicaGroups,
    connect_store,
    open_replica_groups,
    open_store,
)
from aioengine.errors import EngineError
from aioengine.layout import ParallelLayout
from aioengine.worker.pipeline import Feedback, StageLink

LAYOUT = ParallelLayout(pp_size=2, tp_size=2)
CPU = torch.device("cpu")


def check_collectives(group: GroupCoordinator) -> None:
    ranks = torch.tensor(group.ranks, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((3, 2), group.ranks[group.rank_in_group], dtype=dtype)
        assert torch.equal(group.all_reduce(x), torch.full_like(x, int(ranks.sum())))
        for dim, shape in ((0, (6, 2)), (1, (3, 4)), (-1, (3, 4))):
            joined = group.all_gather(x, dim)
            parts = [torch.full_like(x, rank) for rank in group.ranks]
            assert joined.shape == shape
            assert torch.equal(joined, torch.cat(parts, dim))
        assert (x == group.ranks[group.rank_in_group]).all(), "collectives leave their input alone"
    y = torch.tensor([float(group.rank_in_group)])
    assert group.broadcast(y, 1) is y
    assert y.item() == 1.0
    transposed = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(group.all_reduce(transposed), 2 * transposed)
    group.barrier()


def check_compiled(group: GroupCoordinator) -> None:
    """Traceable in one graph, with shapes known from the custom ops' fake kernels."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return group.all_gather(group.all_reduce(x + 1) * 2, 1)

    x = torch.ones(2, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), torch.full((2, 6), 8.0))


def check_stage_link(groups: ReplicaGroups) -> None:
    """Three plans in flight, received in order into buffers that are reused."""
    link = StageLink(
        groups.pp,
        max_num_batched_tokens=8,
        hidden_size=4,
        dtype=torch.float32,
        max_plans_in_flight=3,
    )
    sizes = [5, 1, 8, 3, 2, 8, 1, 4]
    if groups.pp.rank_in_group == 0:
        for seq, size in enumerate(sizes):
            assert link.receive(seq) is None
            link.send(torch.full((size, 4), float(seq)))
    else:
        for seq in range(3):
            link.prepare(seq, sizes[seq])
        for seq, size in enumerate(sizes):
            if seq + 3 < len(sizes):
                link.prepare(seq + 3, sizes[seq + 3])
            assert torch.equal(link.receive(seq), torch.full((size, 4), float(seq)))
    link.close()


def check_feedback(group: GroupCoordinator) -> None:
    """Ids arrive in plan order, whether or not somebody looks at them in between."""
    source = group.ranks.index(2)
    feedback = Feedback(group, source=source, num_slots=4, max_plans_in_flight=2)
    expected = torch.zeros(4, dtype=torch.int64)
    for plan in range(12):
        slots = torch.tensor([plan % 4, (plan + 1) % 4])
        ids = torch.tensor([100 + plan, 200 + plan])
        expected[slots] = ids
        if group.rank_in_group == source:
            feedback.publish(slots, ids)
        else:
            feedback.expect(slots)
            if plan % 5 == 4:
                assert torch.equal(feedback.last_ids(), expected)
    feedback.close()
    assert torch.equal(feedback.last_ids(), expected)


def main() -> None:
    rank = rank_of_this_process()
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    stores = [open_store(HOST)] if rank == 0 else []
    port = agree_on_port(lambda: stores[0].port)
    store = stores[0] if stores else connect_store(HOST, port, TIMEOUT_S)
    groups = open_replica_groups(LAYOUT, rank, store, CPU, TIMEOUT_S)
    assert groups.tp.ranks == LAYOUT.group("tp", rank)
    assert groups.pp.ranks == LAYOUT.group("pp", rank)
    assert (groups.feedback is None) == (rank == 3)
    check_collectives(groups.tp)
    check_collectives(groups.pp)
    check_compiled(groups.tp)
    check_stage_link(groups)
    if groups.feedback is not None:
        assert groups.feedback.ranks == (0, 1, 2)
        check_feedback(groups.feedback)
    groups.close()
    with pytest.raises(EngineError, match=groups.tp.name):
        groups.tp.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
