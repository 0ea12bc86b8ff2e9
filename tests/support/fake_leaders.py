"""Leaders as a front end sees them: what a test says comes back."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from support.mailbox import Mailbox, settle
from support.replicas import info
from support.tiny_model import detokenizer, ids

from aioengine.control.channel import Link, MemoryLink
from aioengine.control.walltime import NO_END, Walltime
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.records import ChoiceSpec
from aioengine.messages import (
    Abort,
    AddRequest,
    ChoiceParams,
    FinishReason,
    FrontEndCommand,
    LoadStats,
    RankInfo,
    ReplicaFailed,
    ReplicaReady,
    RequestDelta,
    StepReport,
    TokenLogprobs,
)


class FakeLeader(Mailbox):
    """Keeps the front end's commands."""

    def ready(self, max_model_len: int = 200, num_ranks: int = 1, **fields: Any) -> None:
        ranks = tuple(info(rank) for rank in range(num_ranks))
        ready = ReplicaReady(
            ranks=ranks,
            num_blocks=64,
            block_size=16,
            max_model_len=max_model_len,
            num_slots=16,
        )
        self.send(msgspec.structs.replace(ready, **fields))

    def fail(self, cause: str) -> None:
        self.send(ReplicaFailed(cause))

    def report(self, *deltas: RequestDelta, num_added: int = 0, **stats: int) -> None:
        load = {"num_blocks": 64, "num_free_blocks": 64, **stats}
        self.send(StepReport(deltas, LoadStats(**load), num_added=num_added))

    def answer(
        self,
        added: AddRequest,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        **fields: Any,
    ) -> None:
        """One report with one delta; log probabilities when they were asked for."""
        num_top = added.params.logprobs
        logprobs: tuple[TokenLogprobs, ...] = ()
        if num_top is not None:
            tops = tuple((ord("a") + i, -1.0 - i) for i in range(num_top))
            logprobs = tuple(TokenLogprobs(-0.5, tops) for _ in token_ids)
        self.report(
            RequestDelta(added.request_id, tuple(token_ids), logprobs, finish_reason, **fields)
        )

    async def added(self, count: int = 1) -> list[AddRequest]:
        """The first `count` requests that came."""
        await self.until(lambda: len(self.of(AddRequest)) >= count)
        return self.of(AddRequest)[:count]

    async def aborted(self, count: int = 1) -> list[str]:
        await self.until(lambda: len(self.of(Abort)) >= count)
        return [abort.request_id for abort in self.of(Abort)]


def front_end_with_leaders(
    num_replicas: int,
    max_concurrent_requests: int = 100,
    heartbeat_seconds: float = 5.0,
    frozen: list[RankInfo] | None = None,
    walltime: Walltime = NO_END,
) -> tuple[FrontEnd, list[FakeLeader]]:
    """Started; no replica is ready."""
    links: list[tuple[Link, RankInfo]] = []
    leaders = []
    for dp_rank in range(num_replicas):
        near, far = MemoryLink.pair(asyncio.get_running_loop())
        links.append((near, info(dp_rank)))
        leaders.append(FakeLeader(far, FrontEndCommand))
    front_end = FrontEnd(
        "fe",
        links,
        max_concurrent_requests=max_concurrent_requests,
        walltime=walltime,
        heartbeat_seconds=heartbeat_seconds,
        on_frozen=frozen.append if frozen is not None else lambda leader: None,
    )
    front_end.start()
    return front_end, leaders


def spec(prompt: str = "abc", stop: tuple[str, ...] = (), **fields: Any) -> ChoiceSpec:
    """One token per byte."""
    params = ChoiceParams(max_tokens=50)
    return ChoiceSpec(
        prompt_ids=ids(prompt), params=params, detokenizer=detokenizer(*stop), **fields
    )


async def serving(num_replicas: int = 1, limit: int = 100) -> tuple[FrontEnd, list[FakeLeader]]:
    """All replicas are ready."""
    front_end, leaders = front_end_with_leaders(num_replicas, limit)
    for leader in leaders:
        leader.ready()
    await settle()
    assert front_end.health == "ok"
    return front_end, leaders


def sample(front_end: FrontEnd, name: str, **labels: str) -> float | None:
    """One figure of the metrics."""
    registry = CollectorRegistry()
    registry.register(front_end.metrics)
    return registry.get_sample_value(f"aioengine:{name}", labels)
