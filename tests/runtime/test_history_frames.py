"""Token history is sent to the output rank and no other; the sequence stays whole for all."""

import pytest
from support.replicas import request, running_replica

from aioengine.messages import StepPlan


@pytest.mark.parametrize(
    ("num_peers", "layout", "output_rank"),
    [
        (0, {}, 0),
        (1, {"tensor_parallel_size": 2}, 0),
        (1, {"pipeline_parallel_size": 2}, 1),
        (3, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
    ],
)
async def test_history_goes_to_the_output_rank_only(
    num_peers: int, layout: dict[str, int], output_rank: int
) -> None:
    async with running_replica(num_peers, output_rank=output_rank, **layout) as replica:
        seen: dict[int, list[StepPlan]] = {}
        for rank, worker in enumerate(replica.workers):
            worker.on_execute = seen.setdefault(rank, []).append
        (front_end,) = replica.front_ends
        prompt = tuple(range(40))
        front_end.send(request("plain", prompt))
        await front_end.until_finished("plain")
        front_end.send(request("penalised", prompt, presence_penalty=1.0))
        await front_end.until_finished("penalised")
    assert len({len(plans) for plans in seen.values()}) == 1
    for rank, plans in seen.items():
        told = [part.token_ids for plan in plans for part in plan.history]
        has_history = rank in (0, output_rank)  # the leader made it: nothing was sent
        assert told == ([prompt[:32]] if has_history else [])
    stripped = [[plan.without_history() for plan in plans] for plans in seen.values()]
    assert all(plans == stripped[0] for plans in stripped)
