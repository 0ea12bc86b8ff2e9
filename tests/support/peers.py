"""One peer, and the leader's end of its link."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from support.fake_worker import FakeWorker
from support.mailbox import Mailbox
from support.replicas import device_thread, info, watch_of

from aioengine.config import EngineConfig
from aioengine.control.channel import MemoryLink
from aioengine.control.deadline import Deadline
from aioengine.control.watch import Failure
from aioengine.engine.peer import Peer
from aioengine.messages import (
    DeviceCall,
    Job,
    NewSlot,
    Ordered,
    PeerEvent,
    Shutdown,
    SlotParams,
    SlotStep,
    StepPlan,
)

CONFIG = EngineConfig(heartbeat_seconds=60.0, kill_frozen=False)
LOAD = DeviceCall("load_model", {})
PARAMS = SlotParams(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice_index=0, logprobs=None
)
PLAN = StepPlan((NewSlot(0, 1, PARAMS),), (SlotStep(0, 1, 0, (4, 5), (1,), True),))


class LeaderBox(Mailbox):
    """The leader's end of the link, and the peer behind it."""

    worker: FakeWorker
    peer: Peer
    outcome: "asyncio.Task[Failure | None]"

    def order(self, *jobs: Job, first: int = 1) -> None:
        for seq, job in enumerate(jobs, start=first):
            self.send(Ordered(seq, job))

    async def failure(self) -> Failure:
        failure = await self.outcome
        assert failure is not None
        return failure


@asynccontextmanager
async def running_peer(
    config: EngineConfig = CONFIG, *, is_output: bool = True
) -> AsyncIterator[LeaderBox]:
    near, far = MemoryLink.pair(asyncio.get_running_loop())
    leader = LeaderBox(near, PeerEvent)
    leader.worker = FakeWorker(is_output=is_output)
    async with AsyncExitStack() as stack:
        device = await stack.enter_async_context(device_thread())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watch = watch_of(1, [info(0)], heartbeat_s=config.heartbeat_seconds)
        peer = Peer(watch, 0, far, device, leader.worker, Deadline(config.startup_timeout_seconds))
        leader.peer = peer
        leader.outcome = tasks.create_task(peer.run(), name="peer")
        try:
            yield leader
        finally:
            leader.worker.gate.set()
            leader.send(Shutdown())
