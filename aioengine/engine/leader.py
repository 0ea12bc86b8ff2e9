"""The leader of a replica: the step loop, the scheduler's only caller."""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from aioengine.config import EngineConfig
from aioengine.control.channel import Link
from aioengine.control.watch import Failure, Watch
from aioengine.engine.device import DeviceThread, DeviceWorker
from aioengine.engine.executor import Executor, StepDone, StepFailed
from aioengine.engine.replica import open_replica
from aioengine.errors import EngineError, ReplicaFailedError, StartupTimeoutError
from aioengine.layout import ParallelLayout
from aioengine.messages import (
    Abort,
    AddRequest,
    DrainRequested,
    FrontEndCommand,
    LoadStats,
    RankInfo,
    ReplicaFailed,
    RequestDelta,
    Shutdown,
    StepReport,
)
from aioengine.model_config import ModelConfig

log = logging.getLogger(__name__)

PEERS_END_S = 5.0
"""How long peers may take to end after Shutdown."""


@dataclass(frozen=True, slots=True)
class FromFrontEnd:
    source: str
    command: FrontEndCommand


@dataclass(frozen=True, slots=True)
class FrontEndLost:
    source: str
    reason: str


Event = FromFrontEnd | FrontEndLost | StepDone | StepFailed


class Leader:
    """Schedules for one replica. Owns its scheduler, executor and the links to front ends.

    `front_ends` maps a front end's name to its link and the rank that carries it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        watch: Watch,
        device: DeviceThread,
        worker: DeviceWorker,
        peers: dict[int, Link],
        front_ends: dict[str, tuple[Link, RankInfo]],
        address: str,
    ) -> None:
        self._config = config
        self._model = model
        self._watch = watch
        self._device = device
        self._worker = worker
        self._address = address
        self._front_ends = {source: link for source, (link, _) in front_ends.items()}
        self._carriers = {source: info for source, (_, info) in front_ends.items()}
        # Bounded by admission at the front ends and by the number of plans in flight.
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        replica = ParallelLayout(
            tp_size=config.tensor_parallel_size,
            pp_size=config.pipeline_parallel_size,
            pcp_size=config.prefill_context_parallel_size,
        )
        self._executor = Executor(
            watch,
            device,
            worker,
            peers,
            watch.me.rank + replica.output_rank_in_replica,
            self._inbox.put_nowait,
            self.request_drain,
        )
        self._deltas: dict[str, list[RequestDelta]] = {source: [] for source in front_ends}
        self._last_stats = LoadStats()
        self.is_ready = False

    async def run(self) -> Failure | None:
        """Serve until Shutdown (None) or the replica's first failure."""
        for source, link in self._front_ends.items():
            link.start(
                FrontEndCommand,
                partial(self._on_command, source),
                partial(self._on_front_end_closed, source),
            )
        try:
            async with asyncio.TaskGroup() as tasks:
                failing = tasks.create_task(self._raise_failure(), name="first failure")
                await self._serve(tasks)
                failing.cancel()
        except ExceptionGroup as group:
            return await self._end_failed(group.exceptions[0])
        return None

    def request_drain(self, request: DrainRequested) -> None:
        """A rank of this replica got SIGTERM: the front ends drain the launch."""
        for link in self._front_ends.values():
            link.send(request)

    def _on_command(self, source: str, command: FrontEndCommand) -> None:
        self._inbox.put_nowait(FromFrontEnd(source, command))

    def _on_front_end_closed(self, source: str, reason: str) -> None:
        self._inbox.put_nowait(FrontEndLost(source, reason))

    # --- life

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        ranks = (self._watch.me, *self._watch.others.values())
        limit_s = self._config.startup_timeout_seconds
        try:
            async with asyncio.timeout(limit_s):
                self._scheduler, ready = await open_replica(
                    self._executor,
                    self._device,
                    self._worker,
                    self._config,
                    self._model,
                    ranks,
                    self._address,
                )
        except TimeoutError:
            raise StartupTimeoutError(
                f"the replica did not load within --startup-timeout-seconds {limit_s:g}"
            ) from None
        beats = tasks.create_task(
            self._watch.run_heartbeats(
                self._config.heartbeat_seconds, self._config.kill_frozen, self._beat
            ),
            name="heartbeats",
        )
        self.is_ready = True
        for link in self._front_ends.values():
            link.send(ready)
        await self._step_loop()
        beats.cancel()
        await self._executor.shut_down(PEERS_END_S)
        await self._device.run(self._worker.call, "close", {})

    async def _raise_failure(self) -> None:
        # Shielded: ending this task must not cancel the watch's own future.
        failure = await asyncio.shield(self._watch.failed)
        raise ReplicaFailedError(failure.cause)

    async def _end_failed(self, error: Exception) -> Failure:
        """Outputs are closed with errors first; the process ends after that."""
        if not isinstance(error, EngineError):
            log.error("the step loop raised", exc_info=error)
        if not self._watch.failed.done():
            self._watch.fail(f"{self._watch.me}: {error}", self._watch.me.rank)
        failure = self._watch.failed.result()
        for link in self._front_ends.values():
            link.send(ReplicaFailed(failure.cause))
            await link.flush()
        await self._executor.announce_failure(failure.cause)
        return failure

    def _beat(self) -> None:
        self._executor.send_heartbeat()
        limit_s = self._config.step_timeout_seconds
        if self._executor.oldest_step_age_s() > limit_s:
            self._watch.fail(
                f"step {self._executor.last_seq + 1} of the replica led by {self._watch.me} did "
                f"not end within --step-timeout-seconds {limit_s:g}"
            )

    # --- step loop

    async def _step_loop(self) -> None:
        """Handle what has come, keep the pipeline full, publish; until Shutdown."""
        while True:
            going_on = self._handle(await self._inbox.get())
            while going_on and not self._inbox.empty():
                going_on = self._handle(self._inbox.get_nowait())
            if not going_on:
                return
            self._fill_pipeline()
            self._publish()

    def _fill_pipeline(self) -> None:
        while self._executor.num_in_flight < self._config.max_plans_in_flight:
            plan = self._scheduler.schedule()
            if plan.is_empty:
                return
            self._executor.submit(plan)

    def _handle(self, event: Event) -> bool:
        """False when the event ends the replica."""
        match event:
            case StepDone(result=result):
                self._collect(self._scheduler.apply(result))
            case StepFailed(plan=plan, error=error):
                log.error("a step failed:\n%s", error.traceback)
                self._collect(
                    self._scheduler.fail_plan(plan, f"{error.type_name}: {error.message}")
                )
            case FromFrontEnd(source=source, command=command):
                return self._obey(source, command)
            case FrontEndLost(source=source, reason=reason):
                self._lose_front_end(source, reason)
            case _:
                assert_never(event)
        return True

    def _obey(self, source: str, command: FrontEndCommand) -> bool:
        match command:
            case AddRequest():
                self._scheduler.add(command, source)
            case Abort(request_id=request_id):
                self._scheduler.abort(source, request_id)
            case Shutdown():
                return False
            case _:
                assert_never(command)
        return True

    def _lose_front_end(self, source: str, reason: str) -> None:
        self._scheduler.abort_source(source)
        del self._front_ends[source], self._deltas[source]
        carrier = self._carriers.pop(source)
        log.warning("front end %s is gone (%s); its requests are aborted", source, reason)
        if not self._front_ends:
            self._watch.fail(
                f"{carrier}: {reason}, and it carried the last front end", carrier.rank
            )

    def _collect(self, deltas: list[tuple[str, RequestDelta]]) -> None:
        for source, delta in deltas:
            if source in self._deltas:
                self._deltas[source].append(delta)

    def _publish(self) -> None:
        """One report per front end, when there is news."""
        stats = self._scheduler.stats()
        is_news = stats != self._last_stats
        self._last_stats = stats
        for source, deltas in self._deltas.items():
            if deltas or is_news:
                self._front_ends[source].send(StepReport(tuple(deltas), stats))
                deltas.clear()
