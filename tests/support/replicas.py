"""One replica in one loop: a Leader, its Peers over memory links, and front ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from support.connections import connected
from support.fake_worker import VOCAB_SIZE, FakeWorker
from support.mailbox import Mailbox

from aioengine.config import EngineConfig
from aioengine.control.channel import Link, MemoryLink
from aioengine.control.deadline import Deadline
from aioengine.control.watch import Failure, Watch
from aioengine.engine.device import DeviceThread
from aioengine.engine.executor import Executor
from aioengine.engine.executor_backend import ExecutorBackend
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.limits import max_frame_bytes
from aioengine.messages import (
    AddRequest,
    ChoiceParams,
    LeaderEvent,
    RankInfo,
    RequestDelta,
    Shutdown,
    StepReport,
)
from aioengine.model_config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    family="llama",
    name="fake",
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=VOCAB_SIZE,
    max_position=1024,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)


def info(rank: int) -> RankInfo:
    # No process has this pid: a test that kills a frozen rank by mistake kills nobody.
    return RankInfo(rank, f"dp0 pp0 tp{rank}", "host", 2**30 + rank)


def watch_of(
    me: int, others: Iterable[RankInfo], *, heartbeat_s: float = 5.0, kill_frozen: bool = True
) -> Watch:
    return Watch(
        info(me),
        {other.rank: other for other in others},
        heartbeat_seconds=heartbeat_s,
        kill_frozen=kill_frozen,
    )


def request(
    request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5, **params: Any
) -> AddRequest:
    sampling = ChoiceParams(max_tokens=max_tokens, **params)
    return AddRequest(request_id=request_id, token_ids=prompt, params=sampling)


@asynccontextmanager
async def device_thread() -> AsyncIterator[DeviceThread]:
    """Left once its tasks are done."""
    device = DeviceThread(asyncio.get_running_loop())
    try:
        yield device
    finally:
        await device.run(lambda: None)
        device.close()


class FrontEndBox(Mailbox):
    """A front end that only collects."""

    def deltas(self, request_id: str) -> list[RequestDelta]:
        reports = self.of(StepReport)
        return [d for report in reports for d in report.deltas if d.request_id == request_id]

    def token_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(t for delta in self.deltas(request_id) for t in delta.token_ids)

    async def until_finished(self, request_id: str) -> RequestDelta:
        def last() -> RequestDelta | None:
            return next((d for d in self.deltas(request_id) if d.finish_reason), None)

        return await self.until(last)


class FakeReplica:
    """`outcomes` holds the task of every rank's run()."""

    def __init__(
        self,
        output_rank: int,
        num_front_ends: int,
        config: EngineConfig,
        links: list[tuple[Link, Link]],
        executor: type[ExecutorBackend],
    ) -> None:
        """`links` are both ends of the link to each peer, the leader's first."""
        loop = asyncio.get_running_loop()
        ranks = range(len(links) + 1)
        self.config = config
        self.executor = executor
        self.workers = [FakeWorker(is_output=rank == output_rank, rank=rank) for rank in ranks]
        self.leader_links: dict[int, Link] = {}
        """The leader's end of its link to each peer."""
        self.peer_links: dict[int, Link] = {}
        self.peers: dict[int, Peer] = {}
        self.front_ends: list[FrontEndBox] = []
        self.outcomes: list[asyncio.Task[Failure | None]] = []
        limits: dict[str, Any] = {
            "heartbeat_s": config.heartbeat_seconds,
            "kill_frozen": config.kill_frozen,
        }
        self.watches = [watch_of(0, map(info, ranks[1:]), **limits)]
        self.watches += [watch_of(rank, [info(0)], **limits) for rank in ranks[1:]]
        for rank, ends in enumerate(links, start=1):
            self.leader_links[rank], self.peer_links[rank] = ends
        self._sources: dict[str, tuple[Link, RankInfo]] = {}
        for i in range(num_front_ends):
            near, far = MemoryLink.pair(loop)
            self._sources[f"front end {i}"] = (far, info(100 + i))
            self.front_ends.append(FrontEndBox(near, LeaderEvent))

    def start(self, tasks: asyncio.TaskGroup, devices: list[DeviceThread]) -> None:
        startup = Deadline(self.config.startup_timeout_seconds)
        self.leader = Leader(
            self.config,
            MODEL,
            self.watches[0],
            devices[0],
            self.workers[0],
            self.leader_links,
            self._sources,
            "127.0.0.1",
            startup,
            self.executor,
        )
        self.outcomes.append(tasks.create_task(self.leader.run(), name="leader"))
        for rank, link in self.peer_links.items():
            worker, watch = self.workers[rank], self.watches[rank]
            self.peers[rank] = Peer(watch, 0, link, devices[rank], worker, startup)
            self.outcomes.append(tasks.create_task(self.peers[rank].run(), name=f"peer {rank}"))

    def kill(self, rank: int) -> None:
        """As if the process of a peer had died: its kernel closes its connection."""
        self.outcomes[rank].cancel()
        self.peer_links[rank].close()

    async def failure(self, rank: int) -> Failure:
        failure = await self.outcomes[rank]
        assert failure is not None
        return failure

    def end(self) -> None:
        """Shut down whatever still runs."""
        for worker in self.workers:
            worker.gate.set()
        for front_end in self.front_ends:
            front_end.send(Shutdown())
        self.front_ends.clear()


def frame_limit(config: EngineConfig) -> int:
    """Of control connections, as a launch would have it."""
    return max_frame_bytes(
        max_model_len=MODEL.max_position,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_slots=config.num_slots,
        block_size=config.block_size,
    )


@asynccontextmanager
async def running_replica(
    num_peers: int = 0,
    *,
    output_rank: int = 0,
    num_front_ends: int = 1,
    over_tcp: bool = False,
    executor: type[ExecutorBackend] = Executor,
    set_up: Callable[[FakeReplica], None] = lambda replica: None,
    **settings: Any,
) -> AsyncIterator[FakeReplica]:
    """A replica that loads when the context is entered and is shut down when it is left.

    Its ranks talk through memory, or `over_tcp`, in frames.
    """
    settings = {"kill_frozen": False, "heartbeat_seconds": 60.0, **settings}
    config = EngineConfig(**settings)
    async with AsyncExitStack() as stack:
        links: list[tuple[Link, Link]] = []
        for _ in range(num_peers):
            if over_tcp:
                links.append(await stack.enter_async_context(connected(frame_limit(config))))
            else:
                links.append(MemoryLink.pair(asyncio.get_running_loop()))
        replica = FakeReplica(output_rank, num_front_ends, config, links, executor)
        set_up(replica)
        devices = [await stack.enter_async_context(device_thread()) for _ in replica.workers]
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        replica.start(tasks, devices)
        stack.callback(replica.end)
        yield replica
