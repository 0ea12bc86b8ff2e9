"""The front end: every client's requests, a link to every leader, and the truth about health."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from aioengine.control.channel import Link
from aioengine.control.deadline import VERDICT_GRACE_S, Deadline
from aioengine.control.loss import explain_loss
from aioengine.control.walltime import Walltime
from aioengine.control.watch import Heartbeats
from aioengine.errors import EngineError, ReplicaFailedError
from aioengine.frontend.metrics import EngineMetrics, Metrics
from aioengine.frontend.records import Choice, ChoiceSpec, Generation
from aioengine.frontend.replica_calls import MakeCommand, ReplicaCalls
from aioengine.frontend.router import Router
from aioengine.frontend.states import Health, Refusal, ReplicaState
from aioengine.messages import (
    Abort,
    AddRequest,
    CallEnded,
    DrainRequested,
    Goodbye,
    Heartbeat,
    LeaderEvent,
    LoadStats,
    RankInfo,
    ReplicaFailed,
    ReplicaReady,
    RequestDelta,
    Shutdown,
    StepReport,
)

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""For the last message to every leader; one may be frozen."""


class UnavailableError(Exception):
    """No new work is taken right now; `code` says why in a word.

    `retry_after_s` is None where nobody knows when it will be.
    """

    def __init__(
        self, message: str, retry_after_s: float | None = None, code: Refusal = "failed"
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code: Refusal = code


@dataclass(slots=True)
class Replica:
    """What this front end knows of one replica."""

    dp_rank: int
    link: Link
    leader: RankInfo
    metrics: Metrics
    ready: ReplicaReady | None = None
    failed_cause: str | None = None
    beat: Heartbeat | None = None
    """The leader's last one."""
    beat_at: float = 0.0
    calls: ReplicaCalls = field(init=False)
    live: dict[str, tuple[Choice, Generation]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = ReplicaCalls(self.link)

    @property
    def stats(self) -> LoadStats:
        return self.metrics.stats

    @property
    def state(self) -> ReplicaState:
        return "failed" if self.failed_cause else "ready" if self.ready else "starting"


class FrontEnd:
    """Owns the links to the leaders and the record of every live choice. Loop thread only."""

    def __init__(
        self,
        name: str,
        leaders: list[tuple[Link, RankInfo]],
        *,
        max_concurrent_requests: int,
        walltime: Walltime,
        heartbeat_seconds: float,
        on_frozen: Callable[[RankInfo], None],
        restart_count: int = 0,
        first_replica: int = 0,
    ) -> None:
        """`first_replica`: where routing begins to rotate."""
        self.restart_count = restart_count
        self.metrics = EngineMetrics(
            len(leaders),
            lambda: self.health,
            lambda: [replica.state for replica in self.replicas],
            restart_count,
        )
        self.replicas = [
            Replica(dp_rank, link, leader, self.metrics.by_replica[dp_rank])
            for dp_rank, (link, leader) in enumerate(leaders)
        ]
        self.is_draining = False
        self.drain_cause: str | None = None
        """Where it is more than that somebody asked for it."""
        self.all_failed = asyncio.Event()
        self.drain_requested = asyncio.Event()
        """A rank of the launch got a signal."""
        self.drain_is_for_walltime = False
        """What that rank says of it."""
        self._name = name
        self._max_concurrent = max_concurrent_requests
        self._walltime = walltime
        self._router = Router(len(leaders), first_replica)
        self._ids = itertools.count()
        self._open: set[Generation] = set()
        self._num_calls = 0
        self._heartbeat_seconds = heartbeat_seconds
        self._beats = Heartbeats(heartbeat_seconds)
        self._on_frozen = on_frozen
        self.started = asyncio.Event()
        """No replica is starting any more, and one serves."""
        self.idle = asyncio.Event()
        """No answer is being computed or sent, and no call is in flight."""
        self.idle.set()

    def start(self) -> None:
        for replica in self.replicas:
            replica.link.start(
                LeaderEvent,
                partial(self._on_event, replica),
                partial(self._on_closed, replica),
            )

    # --- health

    @property
    def health(self) -> Health:
        if all(replica.failed_cause for replica in self.replicas):
            return "failed"
        if self.is_draining:
            return "draining"
        if any(not replica.ready and not replica.failed_cause for replica in self.replicas):
            return "starting"
        return "degraded" if any(replica.failed_cause for replica in self.replicas) else "ok"

    @property
    def causes(self) -> list[str]:
        return [replica.failed_cause for replica in self.replicas if replica.failed_cause]

    @property
    def retry_after_s(self) -> float | None:
        """When a client may find the next job, if this one drains because it ends."""
        return self._walltime.until_end_s if self.drain_cause else None

    @property
    def max_model_len(self) -> int | None:
        """The shortest context of the replicas; None while starting."""
        lengths = [replica.ready.max_model_len for replica in self.replicas if replica.ready]
        return min(lengths) if lengths else None

    @property
    def num_live(self) -> int:
        return sum(len(replica.live) for replica in self.replicas)

    # --- requests

    def generate(self, specs: list[ChoiceSpec], dp_rank: int | None = None) -> Generation:
        """Send every choice to a replica (all to `dp_rank` when given).

        Raises UnavailableError when no new work is taken, ValueError for a dp_rank that is none.
        """
        if dp_rank is not None and not 0 <= dp_rank < len(self.replicas):
            raise ValueError(
                f"X-data-parallel-rank: {dp_rank} is not one of the {len(self.replicas)} replicas"
            )
        self.check_admission(len(specs))
        if dp_rank is not None and (cause := self.replicas[dp_rank].failed_cause):
            raise UnavailableError(cause)
        self._check_walltime(specs)
        generation = Generation([], self._close)
        self._open.add(generation)
        self.idle.clear()
        prompt, prompt_ids = None, None
        for index, spec in enumerate(specs):
            if prompt is None or spec.prompt_ids is not prompt_ids:
                prompt_ids = spec.prompt_ids
                prompt = self._router.prompt(prompt_ids, spec.cache_salt)
            request_id = f"{self._name}-{next(self._ids)}"
            reads_cache = spec.params.prompt_logprobs is None
            place = self._router.place(request_id, prompt, reads_cache=reads_cache, pin=dp_rank)
            replica = self.replicas[place]
            metrics = replica.metrics
            choice = Choice(request_id, index, spec, metrics)
            generation.choices.append(choice)
            replica.live[choice.request_id] = (choice, generation)
            if not spec.params.choice_index:
                metrics.accepted(len(spec.prompt_ids))
            replica.link.send(
                AddRequest(
                    request_id=choice.request_id,
                    token_ids=spec.prompt_ids,
                    params=spec.params,
                    priority=spec.priority,
                    cache_salt=spec.cache_salt,
                )
            )
        return generation

    async def call_replicas(self, make_command: MakeCommand) -> list[Any]:
        """What every leader answers, in DP order; nobody is asked when a replica has failed.

        Raises the error of the first replica that has one, as `ReplicaCalls.call` does. A drain
        waits for it.
        """
        if self.causes:
            raise ReplicaFailedError("; ".join(self.causes))
        self._num_calls += 1
        self.idle.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [
                    tasks.create_task(_outcome(replica.calls.call(make_command)))
                    for replica in self.replicas
                ]
        finally:
            self._num_calls -= 1
            self._note_idle()
        for call in calls:
            if isinstance(error := call.result(), EngineError):
                raise error
        return [call.result() for call in calls]

    def check_admission(self, num_choices: int) -> None:
        """Raises UnavailableError when no new work is taken."""
        health = self.health
        if health in ("starting", "draining"):
            cause = f" ({self.drain_cause})" if self.drain_cause else ""
            raise UnavailableError(f"the server is {health}{cause}", self.retry_after_s, health)
        if health == "failed":
            raise UnavailableError("; ".join(self.causes))
        if self.num_live + num_choices > self._max_concurrent:
            raise UnavailableError(
                f"{self.num_live} requests are in flight, the limit is "
                f"--max-concurrent-requests {self._max_concurrent}",
                code="overloaded",
            )

    def _check_walltime(self, specs: list[ChoiceSpec]) -> None:
        """UnavailableError for what would not end before the job does, at the present pace."""
        left_s = self._walltime.left_s
        asked = max((spec.asked_tokens or 0 for spec in specs), default=0)
        expected_s = self.metrics.pace.expected_s(asked) if asked else None
        if left_s is None or expected_s is None or expected_s <= left_s:
            return
        raise UnavailableError(
            f"{self._walltime.cause}; {asked} tokens take about {expected_s:.0f} s at present, "
            f"{left_s:.0f} s are left",
            self._walltime.until_end_s,
            "walltime",
        )

    def _close(self, generation: Generation) -> None:
        """Its handler is done: the answer is sent, or the client has left."""
        for choice in generation.choices:
            for replica in self.replicas:
                if replica.live.pop(choice.request_id, None) is not None:
                    self._router.ended(replica.dp_rank, choice.request_id)
                    replica.link.send(Abort(choice.request_id))
                    choice.cancel()
        self._open.discard(generation)
        self._note_idle()

    # --- from the leaders

    async def limit_start(self, deadline: Deadline) -> None:
        """Give up on leaders that say neither ready nor failed in time: they are frozen."""
        await asyncio.sleep(deadline.left_s + VERDICT_GRACE_S)
        limit = f"--startup-timeout-seconds {deadline.limit_s:g}"
        for replica in self.replicas:
            if replica.ready is None and replica.failed_cause is None:
                self._on_failed(replica, f"{replica.leader}: not ready within {limit}, and silent")
                self._on_frozen(replica.leader)

    async def run_heartbeats(self) -> None:
        """Tell the leaders that this front end lives, and notice a leader that does not."""
        await self._beats.run(self._send_beats, self._on_silent)

    def _send_beats(self) -> None:
        for replica in self.replicas:
            if replica.failed_cause is None:  # a failed leader in this process reads no more
                replica.link.send(Heartbeat())

    def _on_silent(self, dp_rank: Hashable) -> None:
        assert isinstance(dp_rank, int)
        replica = self.replicas[dp_rank]
        limit = f"--heartbeat-seconds {self._heartbeat_seconds:g}"
        seen = replica.beat.last_words if replica.beat is not None else ""
        self._on_failed(replica, f"{replica.leader}: silent for more than {limit}{seen}")
        self._on_frozen(replica.leader)

    def _on_event(self, replica: Replica, event: LeaderEvent) -> None:
        if replica.failed_cause is not None:
            return
        self._beats.heard(replica.dp_rank)
        match event:
            case StepReport(deltas=deltas, stats=stats, admitted=admitted, num_added=num_added):
                self._router.reported(replica.dp_rank, stats, num_added)
                self._take_deltas(replica, deltas, admitted)
                replica.metrics.stats = stats
            case ReplicaReady():
                replica.ready = event
                self._router.open(replica.dp_rank, event)
                self._note_started()
            case ReplicaFailed(cause=cause):
                self._on_failed(replica, cause)
            case DrainRequested(for_walltime=for_walltime):
                if not self.drain_requested.is_set():
                    self.drain_is_for_walltime = for_walltime
                    self.drain_requested.set()
            case CallEnded():
                replica.calls.on_ended(event)
            case Goodbye():
                self._on_gone(replica, f"{replica.leader}: it has left")
            case Heartbeat():
                replica.beat, replica.beat_at = event, time.monotonic()
            case _:
                assert_never(event)

    def _take_deltas(
        self, replica: Replica, deltas: Sequence[RequestDelta], admitted: Sequence[str]
    ) -> None:
        """What one step brought; every reader hears of it once."""
        now = time.monotonic()
        for request_id in admitted:
            if (entry := replica.live.get(request_id)) is not None:
                entry[0].admit(now)
        awake: dict[Generation, None] = {}
        for delta in deltas:
            entry = replica.live.get(delta.request_id)
            if entry is None:
                continue  # the client left, or a stop string ended it
            choice, generation = entry
            if choice.push(delta, now):
                replica.link.send(Abort(choice.request_id))
            if choice.is_finished:
                del replica.live[choice.request_id]
                self._router.ended(replica.dp_rank, choice.request_id)
            awake[generation] = None
        replica.metrics.end_step()
        for generation in awake:
            generation.wake()

    def _on_closed(self, replica: Replica, reason: str) -> None:
        explain_loss(
            replica.leader,
            reason,
            lambda what: self._on_failed(replica, f"{replica.leader}: {what}"),
        )

    def _on_failed(self, replica: Replica, cause: str) -> None:
        if replica.failed_cause is None:
            log.error("replica dp%d failed: %s", replica.dp_rank, cause)
            self._on_gone(replica, cause)

    def _on_gone(self, replica: Replica, cause: str) -> None:
        replica.failed_cause = cause
        self._router.close(replica.dp_rank)
        self._beats.forget(replica.dp_rank)
        self._fail_live(replica, cause)
        replica.calls.fail(cause)
        replica.metrics.stats = _without_load(replica.stats)
        self._note_started()
        if self.health == "failed":
            self.all_failed.set()

    def _fail_live(self, replica: Replica, cause: str) -> None:
        for choice, generation in replica.live.values():
            choice.fail(cause)
            generation.wake()
        replica.live.clear()

    # --- end

    def begin_drain(self, *, for_walltime: bool = False) -> None:
        """Take no new work; what is in flight goes on."""
        self.is_draining = True
        if for_walltime:
            self.drain_cause = self._walltime.cause

    def end_calls(self, cause: str) -> None:
        """End every call with an error."""
        for replica in self.replicas:
            replica.calls.fail(cause)

    def end_streams(self, cause: str) -> None:
        """End every live choice with an error."""
        for replica in self.replicas:
            for choice, _ in replica.live.values():
                self._router.ended(replica.dp_rank, choice.request_id)
                replica.link.send(Abort(choice.request_id))
            self._fail_live(replica, cause)

    async def shut_down(self) -> None:
        """Tell every leader to end, and hang up: that they leave is no failure any more."""
        for replica in self.replicas:
            replica.link.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                for replica in self.replicas:
                    await replica.link.flush()
        for replica in self.replicas:
            replica.link.close()

    def _note_idle(self) -> None:
        if not self._open and not self._num_calls:
            self.idle.set()

    def _note_started(self) -> None:
        if self.health in ("ok", "degraded"):
            self.started.set()


async def _outcome(call: Awaitable[Any]) -> Any:
    """What it returns, or the EngineError that it raises: a TaskGroup would wrap that."""
    try:
        return await call
    except EngineError as error:
        return error


def _without_load(stats: LoadStats) -> LoadStats:
    """The counters of a replica that is gone; its gauges are zero."""
    return LoadStats(
        num_preemptions=stats.num_preemptions,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        last_seq=stats.last_seq,
    )
