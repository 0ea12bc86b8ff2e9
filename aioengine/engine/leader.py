"""The leader of a replica: the step loop, the scheduler's only caller."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from aioengine.config import EngineConfig
from aioengine.control.channel import Link
from aioengine.control.deadline import Deadline
from aioengine.control.loss import explain_loss
from aioengine.control.watch import Failure, Heartbeats, Watch
from aioengine.engine.device import DeviceThread, DeviceWorker
from aioengine.engine.executor import Executor, RankNews, StepDone, StepFailed
from aioengine.engine.executor_backend import ExecutorBackend
from aioengine.engine.phases import LeaderPhases
from aioengine.engine.replica import open_replica
from aioengine.errors import (
    EngineError,
    ReplicaFailedError,
    StartupTimeoutError,
    StepTimeoutError,
    WorkerError,
)
from aioengine.layout import ParallelLayout
from aioengine.messages import (
    Abort,
    AddRequest,
    CallEnded,
    DrainRequested,
    EngineLeft,
    FrontEndCommand,
    Goodbye,
    Heartbeat,
    LoadStats,
    PhaseEntered,
    RankInfo,
    RemoteCall,
    ReplicaCall,
    ReplicaFailed,
    RequestDelta,
    ResetPrefixCache,
    Shutdown,
    StepReport,
)
from aioengine.model_config import ModelConfig
from aioengine.rpc import encode_arguments, encode_value, method_name
from aioengine.timeline.probe import AnyProbe, Kind, Probe

log = logging.getLogger(__name__)

PEERS_END_S = 5.0
"""How long peers may take to end after Shutdown."""
FAREWELL_S = 2.0
"""For the last messages of a failed replica; a receiver may be frozen."""


@dataclass(frozen=True, slots=True)
class FromFrontEnd:
    source: str
    command: FrontEndCommand


@dataclass(frozen=True, slots=True)
class FrontEndLost:
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class PhaseEnding:
    """The program around this engine leaves `active()`."""


Event = FromFrontEnd | FrontEndLost | StepDone | StepFailed | PhaseEnding


class Leader:
    """Schedules for one replica. Owns its scheduler, executor and the links to front ends.

    `front_ends` maps a front end's name to its link and the rank that carries it; `executor` is
    the class of its way to the ranks. An engine inside a trainer's ranks has a `home`, the front
    end of its own process: it ends with that one, and the silence of front ends means nothing.
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
        startup: Deadline,
        executor: type[ExecutorBackend] = Executor,
        home: str | None = None,
    ) -> None:
        self._config = config
        self._home = home
        self._model = model
        self._watch = watch
        self._device = device
        self._worker = worker
        self.activity = worker.activity
        self._address = address
        self._startup = startup
        self._front_ends = {source: link for source, (link, _) in front_ends.items()}
        self._carriers = {source: info for source, (_, info) in front_ends.items()}
        # Bounded by admission at the front ends and by the number of plans in flight.
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        replica = ParallelLayout(
            tp_size=config.tensor_parallel_size,
            pp_size=config.pipeline_parallel_size,
            pcp_size=config.prefill_context_parallel_size,
        )
        self._executor = executor(
            watch=watch,
            device=device,
            worker=worker,
            peers=peers,
            output_rank=watch.me.rank + replica.output_rank_in_replica,
            on_step=self._inbox.put_nowait,
            on_news=self._on_rank_news,
        )
        self.phases = LeaderPhases(watch, self._executor.broadcast)
        self._front_end_beats = Heartbeats(config.heartbeat_seconds)
        if home is not None:
            self._front_end_beats.pause()
        self._deltas: dict[str, list[RequestDelta]] = {source: [] for source in front_ends}
        self._num_added = dict.fromkeys(front_ends, 0)
        self._last_stats = LoadStats()
        self._tasks: asyncio.TaskGroup
        self._calls: set[asyncio.Task[None]] = set()
        """Each answers a ReplicaCall."""
        self._is_phase_ending = False
        self.ready = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.ready.is_set()

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

    def end_phase(self) -> None:
        """Compute what is left, then release the peers from the phase; `phases.wait_left` waits for
        it. Requests that are not to be finished must have been aborted before."""
        self._inbox.put_nowait(PhaseEnding())

    def _on_rank_news(self, rank: int, news: RankNews) -> None:
        match news:
            case DrainRequested():
                self.request_drain(news)
            case PhaseEntered():
                self.phases.on_entered(rank, news)
            case EngineLeft():
                self.phases.on_left(rank)
            case _:
                assert_never(news)

    def request_drain(self, request: DrainRequested) -> None:
        """A rank of this replica got a signal: the front ends drain the launch."""
        for link in self._front_ends.values():
            link.send(request)

    @property
    def load(self) -> LoadStats:
        """As it was published last. Any thread."""
        return self._last_stats

    def look(self) -> Heartbeat:
        """What this rank's device thread is in. Any thread."""
        return self._executor.look()

    def loop_probes(self) -> list[Probe]:
        """What this loop does for a step, once the replica is ready."""
        return [
            Probe(self._scheduler, "schedule", Kind.PLAN),
            Probe(self._executor, "submit", Kind.SEND_PLAN),
            Probe(self._scheduler, "apply", Kind.APPLY),
            Probe(self, "_publish", Kind.REPORT),
        ]

    def device_probes(self) -> Sequence[AnyProbe]:
        return self._worker.probes()

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a method on every rank of this replica, in order with its steps.

        `method` is a registered name or a function of a module that every rank can import; it gets
        the rank's worker first. Returns the values in rank order, or the one of
        `unique_reply_rank` (a rank of the replica). Raises TypeError for what cannot travel,
        ValueError for a rank that is none, and what `Executor.remote_call` says.
        """
        call = self.prepare_call(method, args, kwargs or {}, unique_reply_rank)
        return await self._executor.remote_call(call, timeout_s)

    def prepare_call(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        unique_reply_rank: int | None,
    ) -> RemoteCall:
        """Raises TypeError and ValueError, as `collective_rpc` does."""
        num_ranks = 1 + len(self._watch.others)
        if unique_reply_rank is not None and not 0 <= unique_reply_rank < num_ranks:
            raise ValueError(
                f"unique_reply_rank {unique_reply_rank} is not one of the {num_ranks} ranks of "
                "this replica"
            )
        return RemoteCall(method_name(method), encode_arguments(args, kwargs), unique_reply_rank)

    def _on_command(self, source: str, command: FrontEndCommand) -> None:
        self._front_end_beats.heard(source)
        self._inbox.put_nowait(FromFrontEnd(source, command))

    def _on_front_end_closed(self, source: str, reason: str) -> None:
        explain_loss(self._carriers[source], reason, partial(self._on_front_end_lost, source))

    def _on_front_end_lost(self, source: str, reason: str) -> None:
        self._inbox.put_nowait(FrontEndLost(source, reason))

    # --- life

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        ranks = (self._watch.me, *self._watch.others.values())
        try:
            async with self._startup.bound():
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
            raise StartupTimeoutError(self._blame_slow_ranks()) from None
        self._executor.send_heartbeats()  # says that the replica is ready
        beats = [
            tasks.create_task(self._watch.run_heartbeats(self._beat), name="heartbeats"),
            tasks.create_task(
                self._front_end_beats.run(self._beat_front_ends, self._on_front_end_silent),
                name="front end heartbeats",
            ),
        ]
        self.ready.set()
        for link in self._front_ends.values():
            link.send(ready)
        await self._step_loop()
        if self._calls:  # of other front ends
            await asyncio.wait(self._calls, timeout=PEERS_END_S)
        for task in (*beats, *self._calls):
            task.cancel()
        for link in self._front_ends.values():
            link.send(Goodbye())
        await self._executor.shut_down(PEERS_END_S)
        limit_s = self._config.step_timeout_seconds
        try:
            async with asyncio.timeout(limit_s):
                await self._device.run(self._worker.call, "close", {})
        except TimeoutError:
            raise StepTimeoutError(
                f"the last step did not end within --step-timeout-seconds {limit_s:g}"
            ) from None

    def _blame_slow_ranks(self) -> str:
        method, ranks = self._executor.unanswered()
        infos = {self._watch.me.rank: self._watch.me, **self._watch.others}
        for rank in self._watch.others.keys() & set(ranks):
            self._watch.kill(rank)
        hosts = ", ".join(sorted({info.host for info in infos.values()}))
        return (
            f"no answer to {method} from {', '.join(str(infos[rank]) for rank in ranks)} within "
            f"--startup-timeout-seconds {self._startup.limit_s:g}; hosts of this replica: {hosts}. "
            "Look at that rank's own log, whether its process is stopped, and whether the hosts "
            "reach each other on every port"
        )

    async def _raise_failure(self) -> None:
        # Shielded: ending this task must not cancel the watch's own future.
        failure = await asyncio.shield(self._watch.failed)
        raise ReplicaFailedError(failure.cause)

    async def _end_failed(self, error: Exception) -> Failure:
        """Outputs are closed with errors first; the process ends after that."""
        text = str(error)
        if not isinstance(error, EngineError):
            log.error("the step loop raised", exc_info=error)
            text = f"{type(error).__name__}: {error}"
        if not self._watch.failed.done():
            self._watch.fail(f"{self._watch.me}: {text}", self._watch.me.rank)
        failure = self._watch.failed.result()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                for link in self._front_ends.values():
                    link.send(ReplicaFailed(failure.cause, failure.rank))
                await self._executor.announce_failure(failure)
                for link in self._front_ends.values():
                    await link.flush()
        return failure

    def _beat(self) -> None:
        self._executor.send_heartbeats()
        limit_s = self._config.step_timeout_seconds
        if (step := self._executor.late_step(limit_s)) is not None:
            self._watch.fail_step(step, limit_s)

    def _beat_front_ends(self) -> None:
        for link in self._front_ends.values():
            link.send(self._executor.last_beat)

    def _on_front_end_silent(self, source: Hashable) -> None:
        assert isinstance(source, str)
        limit = f"--heartbeat-seconds {self._config.heartbeat_seconds:g}"
        self._on_front_end_lost(source, f"silent for more than {limit}")

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
            self._note_idle()

    def _fill_pipeline(self) -> None:
        while self._executor.num_in_flight < self._config.max_plans_in_flight:
            plan = self._scheduler.schedule()
            if plan.is_empty:
                return
            self._executor.submit(plan)

    def _handle(self, event: Event) -> bool:
        """False when no front end is left that keeps the replica alive."""
        match event:
            case StepDone(result=result):
                self._collect(self._scheduler.apply(result))
            case StepFailed(plan=plan, error=error):
                log.error("a step failed:\n%s", error.traceback)
                self._collect(
                    self._scheduler.fail_plan(plan, f"{error.type_name}: {error.message}")
                )
            case FromFrontEnd(source=source, command=command):
                self._obey(source, command)
            case FrontEndLost(source=source, reason=reason):
                self._lose_front_end(source, reason)
            case PhaseEnding():
                self._is_phase_ending = True
            case _:
                assert_never(event)
        return bool(self._front_ends) if self._home is None else self._home in self._front_ends

    def _note_idle(self) -> None:
        if self._is_phase_ending and not self._executor.num_in_flight:
            self._is_phase_ending = False
            # Behind calls that are no steps.
            self._device.submit(lambda: None, lambda *_: self.phases.leave())

    def _obey(self, source: str, command: FrontEndCommand) -> None:
        match command:
            case AddRequest():
                self._scheduler.add(command, source)
                self._num_added[source] += 1
            case Abort(request_id=request_id):
                self._scheduler.abort(source, request_id)
            case ReplicaCall():
                task = self._tasks.create_task(self._answer_call(source, command), name="rpc")
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case ResetPrefixCache(call_id=call_id):
                self._scheduler.reset_prefix_cache()
                self._front_ends[source].send(CallEnded(call_id, encode_value(None, "nothing")))
            case Heartbeat():
                pass  # its arrival is what counts
            case Shutdown():
                self._forget_front_end(source)
            case _:
                assert_never(command)

    async def _answer_call(self, source: str, command: ReplicaCall) -> None:
        try:
            value = await self._executor.remote_call(command.call, command.timeout_s)
            ended = CallEnded(command.call_id, encode_value(value, command.call.method))
        except WorkerError as error:
            ended = CallEnded(
                command.call_id,
                error_type=error.type_name,
                message=error.message,
                where=error.where,
                traceback=error.traceback,
            )
        except EngineError as error:
            name = type(error).__name__
            ended = CallEnded(command.call_id, error_type=name, message=str(error))
        except TypeError as error:  # the values of all ranks together cannot travel
            ended = CallEnded(
                command.call_id, error_type="TypeError", message=str(error), where="all ranks"
            )
        if source in self._front_ends:
            self._front_ends[source].send(ended)

    def _forget_front_end(self, source: str) -> None:
        self._scheduler.abort_source(source)
        self._front_end_beats.forget(source)
        self._front_ends.pop(source).close()
        del self._deltas[source], self._num_added[source]

    def _lose_front_end(self, source: str, reason: str) -> None:
        if source not in self._front_ends:
            return  # it said Shutdown before
        log.warning("front end %s is gone (%s); its requests are aborted", source, reason)
        self._forget_front_end(source)
        if not self._front_ends:
            carrier = self._carriers[source]
            cause = f"{carrier}: {reason}, and it carried the last front end"
            self._watch.fail(cause, carrier.rank)
            raise ReplicaFailedError(cause)

    def _collect(self, deltas: list[tuple[str, RequestDelta]]) -> None:
        for source, delta in deltas:
            if source in self._deltas:
                self._deltas[source].append(delta)

    def _publish(self) -> None:
        """One report per front end, when there is news."""
        stats = self._scheduler.stats()
        is_news = stats != self._last_stats
        self._last_stats = stats
        admitted = self._scheduler.take_admitted()
        for source, deltas in self._deltas.items():
            ids = tuple([request_id for key, request_id in admitted if key == source])
            if deltas or ids or is_news:
                report = StepReport(tuple(deltas), stats, ids, self._num_added[source])
                self._front_ends[source].send(report)
                deltas.clear()
