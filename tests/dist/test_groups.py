"""Process groups, on real gloo ranks and on one rank alone."""

import pytest
import torch
import torch.distributed
from support.ranks import run_ranks

from aioengine.dist.worlds import GroupOptions, open_replica_groups, open_world_groups
from aioengine.errors import EngineError
from aioengine.layout import ParallelLayout

OPTIONS = GroupOptions(device=torch.device("cpu"), timeout_s=1.0)


def test_worlds_of_four_ranks() -> None:
    """A replica whose store is gone, a trainer's world, a mixture's."""
    run_ranks("support.groups_ranks", 5)


def test_a_replica_of_one_rank_needs_no_torch_groups() -> None:
    layout = ParallelLayout(dp_size=3)
    groups = open_replica_groups(layout, 1, None, OPTIONS)
    assert not torch.distributed.is_initialized()
    assert groups.dp.ranks == (0, 1, 2)
    assert groups.dp.rank_in_group == 1
    x = torch.ones(2)
    values = {"x": x, "n": 1}
    for group in (groups.tp, groups.dcp, groups.pcp, groups.pp, groups.feedback):
        assert group is not None
        assert (group.ranks, group.rank_in_group, group.world_size) == ((1,), 0, 1)
        assert group.all_reduce(x) is x
        assert group.all_gather(x, 0) is x
        assert group.reduce_scatter(x, 0) is x
        assert group.broadcast(x, 0) is x
        assert group.broadcast_object(values, 0) is values
        assert group.broadcast_tensor_dict(values, 0) is values
        group.barrier()
    groups.close()


def test_replicas_of_a_dense_model_share_nothing() -> None:
    dp = open_replica_groups(ParallelLayout(dp_size=3), 1, None, OPTIONS).dp
    with pytest.raises(EngineError, match=rf"no open process group '{dp.name}'"):
        dp.all_reduce(torch.ones(1))
    for call in (
        lambda: dp.broadcast(torch.ones(1), 0),
        lambda: dp.broadcast_object(1, 0),
        lambda: dp.broadcast_tensor_dict({}, 0),
        lambda: dp.isend(torch.ones(1), 0),
        lambda: dp.irecv_tensor_dict(0),
        lambda: dp.barrier(),
    ):
        with pytest.raises(EngineError, match=r"\[ranks 0, 1, 2\] moves no data"):
            call()


def test_experts_need_a_mixture() -> None:
    layout = ParallelLayout()
    mixture = open_world_groups(layout, 0, None, OPTIONS, is_mixture=True)
    assert mixture.ep.ranks == mixture.eplb.ranks == (0,)
    dense = open_world_groups(layout, 0, None, OPTIONS, is_mixture=False)
    with pytest.raises(EngineError, match="no ep group: the model is dense"):
        _ = dense.ep
    with pytest.raises(EngineError, match="no eplb group: the model is dense"):
        _ = dense.eplb
