"""Run by test_groups.py on 5 ranks: the groups of a 2 × 2 replica whose store, served by rank 4, is
gone once they are open; then those of 4 ranks in a trainer's world, and in a mixture's.
"""

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import HOST, TIMEOUT_S, agree_on_port, launch_store, rank_of_this_process
from torch import Tensor

from aioengine.dist.groups import GroupCoordinator
from aioengine.dist.symmetric_memory import open_symmetric_memory
from aioengine.dist.tensor_dict import MAX_DICTS_IN_FLIGHT
from aioengine.dist.worlds import (
    GroupOptions,
    Groups,
    ServedStore,
    connect_store,
    open_replica_groups,
    open_world_groups,
)
from aioengine.errors import EngineError
from aioengine.layout import ParallelLayout
from aioengine.worker.pipeline import Feedback, StageLink

LAYOUT = ParallelLayout(pp_size=2, tp_size=2)
STORE_RANK = 4
OPTIONS = GroupOptions(device=torch.device("cpu"), timeout_s=TIMEOUT_S)


# --- one group


def check_collectives(group: GroupCoordinator) -> None:
    """Each once; test_collectives.py looks at their values."""
    n, me = group.world_size, group.rank_in_group
    x = torch.arange(2.0 * n) + me
    total = sum(torch.arange(2.0 * n) + member for member in range(n))
    assert torch.equal(group.all_reduce(x), total)
    assert torch.equal(group.reduce_scatter(x, 0), total[2 * me : 2 * me + 2])
    assert torch.equal(group.all_gather(x, 0).view(n, -1)[:, 0], torch.arange(float(n)))
    assert torch.equal(group.broadcast(x, n - 1), torch.arange(2.0 * n) + n - 1)
    group.barrier()


def check_objects(group: GroupCoordinator) -> None:
    """From the last member to all; plain values come back as they were."""
    source = group.world_size - 1
    is_source = group.rank_in_group == source
    for value in (
        None,
        True,
        -(2**63),
        1.5,
        "ü",
        b"\0",
        [1, [None]],
        {"a": {"b": []}},
        "x" * 10**6,
    ):
        assert group.broadcast_object(value if is_source else None, source) == value
    if is_source:
        for bad in ({1}, {"a": [1j]}, {1: 2}, 2**64):
            with pytest.raises(TypeError, match="broadcast_object"):
                group.broadcast_object(bad, source)


def sample_dict(number: int) -> dict[str, Any]:
    """Differs in everything, sizes included, from that of another number."""
    return {
        "step": number,
        "hidden.states": torch.full((number + 1, 3), float(number), dtype=torch.bfloat16),
        "empty": torch.empty(0, number),
        "scalar": torch.tensor(number),
        "flags": torch.arange(number + 2) % 2 == 0,
        "strided": torch.arange(6 * (number + 1)).view(2, -1).t(),
        "nested": {"names": ["a", None], "blob": b"\1" * number},
    }


def check_same_dict(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


def check_tensor_dicts(group: GroupCoordinator) -> None:
    """Several on their way between members 0 and 1, beside plain sends, with dropped handles."""
    source = group.world_size - 1
    mine = sample_dict(4) if group.rank_in_group == source else None
    check_same_dict(dict(group.broadcast_tensor_dict(mine, source)), sample_dict(4))
    if group.rank_in_group > 1:
        return
    peer = 1 - group.rank_in_group
    for number in range(3):
        values = sample_dict(number)
        group.isend_tensor_dict(values, peer)
        for value in values.values():
            if isinstance(value, Tensor):
                value.zero_()  # what is sent is a copy
    plain = group.isend(torch.tensor([7.0]), peer)
    last = group.isend_tensor_dict({}, peer)
    awaited = [group.irecv_tensor_dict(peer) for _ in range(4)]
    assert group.irecv(torch.zeros(1), peer).wait().item() == 7.0
    check_same_dict(awaited[2].wait(), sample_dict(2))
    for number in range(2):
        check_same_dict(awaited[number].wait(), sample_dict(number))
    assert awaited[3].wait() == {}
    assert awaited[3].wait() == {}
    plain.wait()
    last.wait()


def check_many_dicts(group: GroupCoordinator) -> None:
    """More than may be in flight, one way."""
    num_dicts = MAX_DICTS_IN_FLIGHT + 3
    if group.rank_in_group == 0:
        for number in range(num_dicts):
            group.isend_tensor_dict({"number": number}, 1)
    elif group.rank_in_group == 1:
        awaited = [group.irecv_tensor_dict(0) for _ in range(num_dicts)]
        assert [one.wait()["number"] for one in awaited] == list(range(num_dicts))


def check_refused_symmetric_memory(group: GroupCoordinator) -> None:
    """What one rank finds in its way, all say."""
    for node, text in (("0", "not available"), (str(group.rank_in_group), "several nodes")):
        device = torch.device("cuda", group.rank_in_group)
        opened = open_symmetric_memory(device, node, group.device_group, group.cpu_group)
        assert isinstance(opened, str)
        assert text in opened or torch.cuda.is_available()


def check_group(group: GroupCoordinator) -> None:
    check_collectives(group)
    check_objects(group)
    check_tensor_dicts(group)
    check_many_dicts(group)


# --- the pipeline's own transfers


def check_stage_link(groups: Groups) -> None:
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
            feedback.expect(slots, slots.numpy())
            if plan % 5 == 4:
                assert torch.equal(feedback.last_ids(np.arange(4)), expected)
    feedback.close()
    assert torch.equal(feedback.last_ids(np.arange(4)), expected)


# --- worlds


def serve_store() -> None:
    """Until the others say that their groups are open; then it is gone with this process."""
    store = ServedStore(HOST)
    agree_on_port(lambda: store.port, "replica", STORE_RANK)
    store.wait([f"open/{rank}" for rank in range(STORE_RANK)])


def check_replica_without_store(rank: int) -> None:
    store = connect_store(HOST, agree_on_port(int, "replica", STORE_RANK), TIMEOUT_S)
    groups = open_replica_groups(LAYOUT, rank, store, OPTIONS)
    store.set(f"open/{rank}", "")
    with pytest.raises(dist.DistError):  # the end of the connection
        store.wait(["never"])
    for axis, group in (("tp", groups.tp), ("pp", groups.pp)):
        assert group.ranks == LAYOUT.group(axis, rank)
        check_group(group)
    for group in (groups.dp, groups.pcp, groups.dcp):
        assert group.ranks == (rank,)
    check_refused_symmetric_memory(groups.tp)
    check_stage_link(groups)
    assert (groups.feedback is None) == (rank == 3)
    if groups.feedback is not None:
        assert groups.feedback.ranks == (0, 1, 2)
        check_collectives(groups.feedback)
        check_feedback(groups.feedback)
    with pytest.raises(EngineError, match="the model is dense"):
        _ = groups.ep
    groups.close()
    assert not dist.is_initialized()
    with pytest.raises(EngineError, match=groups.tp.name):
        groups.tp.all_reduce(torch.ones(1))
    with pytest.raises(EngineError, match=f"{groups.tp.name}.*closed"):
        groups.tp.broadcast(torch.ones(1), 0)


def check_trainer_world(rank: int) -> None:
    """Two engines at a time in a world that is not theirs, and one after them."""
    world = dist.PrefixStore("trainer", launch_store())
    dist.init_process_group("gloo", store=world, rank=rank, world_size=4)
    with pytest.raises(ValueError, match=rf"rank {rank} of 4 there, but rank {rank} of 2"):
        open_world_groups(ParallelLayout(tp_size=2), rank, None, OPTIONS, is_mixture=False)
    num_ranks = dist.get_world_size()
    whole = ParallelLayout.fit(num_ranks, tp_size=2, pp_size=2, dp_size=1, external_dp_size="auto")
    pairs = ParallelLayout.fit(num_ranks, tp_size=2, dp_size=1, external_dp_size="auto")
    first = open_world_groups(whole, rank, None, OPTIONS, is_mixture=False)
    second = open_world_groups(pairs, rank, None, OPTIONS, is_mixture=False)
    assert first.pp.ranks == (rank % 2, rank % 2 + 2)
    assert second.tp.ranks == (rank - rank % 2, rank - rank % 2 + 1)
    assert first.tp.name != second.tp.name
    for group in (first.tp, first.pp, second.tp):
        check_collectives(group)
    check_stage_link(first)
    first.close()
    check_collectives(second.tp)
    second.close()
    third = open_world_groups(pairs, rank, None, OPTIONS, is_mixture=False)
    assert third.tp.name not in (first.tp.name, second.tp.name)
    check_collectives(third.tp)
    third.close()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == num_ranks, "the trainer's own group is left alive"
    dist.destroy_process_group()


def check_mixture_world(rank: int) -> None:
    layout = ParallelLayout(dp_size=2, tp_size=2, dcp_size=2)
    store = dist.PrefixStore("mixture", launch_store())
    groups = open_world_groups(layout, rank, store, OPTIONS, is_mixture=True)
    assert groups.ep.ranks == groups.eplb.ranks == (0, 1, 2, 3)
    assert groups.ep.name != groups.eplb.name
    assert groups.dp.ranks == (rank % 2, rank % 2 + 2)
    for group in (groups.tp, groups.dcp, groups.dp, groups.ep, groups.eplb):
        check_collectives(group)
    groups.close()
    assert not dist.is_initialized()


def main() -> None:
    rank = rank_of_this_process()
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    torch.set_num_threads(1)
    if rank == STORE_RANK:
        serve_store()
        return
    check_replica_without_store(rank)
    check_trainer_world(rank)
    check_mixture_world(rank)


if __name__ == "__main__":
    main()
