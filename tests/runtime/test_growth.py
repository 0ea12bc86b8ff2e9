"""Nothing grows with requests that have ended: leader, executor, links, device thread, peers."""

import random
from collections import Counter

import pytest
from support.containers import container_sizes
from support.replicas import FakeReplica, request, running_replica

from aioengine.messages import Abort, ReplicaReady, StepReport

BATCH = 50
TOLERANCE = 100
"""A tenth of the requests that have come and gone."""


async def serve(replica: FakeReplica, numbers: range) -> None:
    """Requests with prompts of their own; one in ten is aborted. Returns when all have ended."""
    (front_end,) = replica.front_ends
    draw = random.Random(numbers.start)
    for first in range(numbers.start, numbers.stop, BATCH):
        front_end.messages.clear()
        for number in range(first, first + BATCH):
            prompt = tuple(draw.randrange(97) for _ in range(20))
            front_end.send(request(str(number), prompt, 1 + number % 30))
            if number % 10 == 0:
                front_end.send(Abort(str(number)))
        await front_end.until(lambda: _num_ended(front_end.of(StepReport)) == BATCH * 9 // 10)


def _num_ended(reports: list[StepReport]) -> int:
    return sum(delta.finish_reason is not None for report in reports for delta in report.deltas)


def sizes(replica: FakeReplica) -> Counter[str]:
    return container_sizes(replica.leader, *replica.peers.values())


@pytest.mark.parametrize("num_peers", [0, 1])
async def test_nothing_grows_with_finished_requests(num_peers: int) -> None:
    async with running_replica(num_peers, over_tcp=True, max_num_seqs=16) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        await serve(replica, range(500))
        before = sizes(replica)
        assert before["BlockPool._block_ids"] > 0, "the prefix cache is full"
        await serve(replica, range(500, 1500))
        after = sizes(replica)
        grown = {name: size - before[name] for name, size in after.items()}
        assert {name: more for name, more in grown.items() if more > TOLERANCE} == {}
