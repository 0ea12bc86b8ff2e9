"""Process groups, on real gloo ranks and on one rank alone."""

import pytest
import torch
import torch.distributed
from support.ranks import run_ranks

from aioengine.dist import ops
from aioengine.dist.groups import open_replica_groups
from aioengine.errors import EngineError
from aioengine.layout import ParallelLayout


def test_four_ranks() -> None:
    run_ranks("support.collectives_ranks", 4)


def test_a_replica_of_one_rank_needs_no_torch_groups() -> None:
    layout = ParallelLayout(dp_size=3)
    groups = open_replica_groups(layout, 1, None, torch.device("cpu"), 1.0)
    assert not torch.distributed.is_initialized()
    assert groups.dp.ranks == (0, 1, 2)
    assert groups.dp.rank_in_group == 1
    x = torch.ones(2)
    for group in (groups.tp, groups.pp, groups.feedback):
        assert group is not None
        assert group.ranks == (1,)
        assert group.all_reduce(x) is x
        assert group.all_gather(x, 0) is x
        assert group.broadcast(x, 0) is x
        group.barrier()
    groups.close()


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(EngineError, match="'tp:99'"):
        ops.all_reduce(torch.ones(1), "tp:99")
