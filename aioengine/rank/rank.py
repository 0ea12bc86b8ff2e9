"""One rank's life: it meets the others, runs its roles, and ends as the contract says."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, NoReturn

from aioengine.activity import IDLE
from aioengine.checkpoint.source import ModelSource
from aioengine.control.deadline import wait_first
from aioengine.control.signals import Signals
from aioengine.control.stacks import format_stacks, stacks_of_threads
from aioengine.control.trace import TraceThread
from aioengine.control.watch import Failure, kill_if_here
from aioengine.dist.launcher import report_to_launcher
from aioengine.engine.device import DeviceThread
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.tracer import Tracer
from aioengine.messages import DrainRequested, RankInfo
from aioengine.model_config import ModelConfig
from aioengine.rank.interpreter import settle_interpreter
from aioengine.rank.joining import Links, join_launch
from aioengine.rank.place import Place
from aioengine.rank.recording import StepRecorder
from aioengine.rank.roles import new_engine, new_front_end, new_watch, new_worker
from aioengine.rank.serving import HttpService
from aioengine.rank.tracing import TraceSubject

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_STARTUP: Final = 1
EXIT_OWN_FAILURE: Final = 70
EXIT_LOST_PEER: Final = 71
BLAME_HOLD_S: Final = 2.0
"""Survivors wait this long for the launcher's SIGTERM, so that it blames the rank that died."""


class Rank:
    """Owns this rank's links, device thread, engine and front end while `live` runs."""

    def __init__(
        self,
        place: Place,
        model: ModelConfig,
        source: ModelSource,
        signals: Signals,
        leave: Callable[[int], NoReturn],
    ) -> None:
        self._place = place
        self._model = model
        self._source = source
        self._signals = signals
        self._leave = leave
        self._engine: Leader | Peer | None = None
        self._front_end: FrontEnd | None = None
        self._has_failed = False
        """This rank or its replica. A front end serves on with the replicas that are left."""

    def on_drain_signal(self, life: "asyncio.Task[int]") -> None:
        """Before ready the rank just ends, later the front ends drain the launch."""
        if self._has_failed:
            return  # what is left of this rank is its front end, which sees the signal itself
        if self._engine is None or not self._engine.is_ready:
            life.cancel()
        else:
            request = DrainRequested(self._place.rank, self._signals.is_for_walltime)
            self._engine.request_drain(request)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: whoever waits for what it should have done would wait for ever."""
        loop.default_exception_handler(context)
        if "handle" in context:
            self.say_first_failure(f"{self._place.info}: {context['message']}")
            self._leave(EXIT_OWN_FAILURE)

    def say_first_failure(self, cause: str, *, is_own: bool = True) -> None:
        """One line in this rank's log, and the launcher's file; what comes later is no first.

        A rank that lost another one writes that file when it ends: the launcher blames whose file
        is the oldest, and dates a rank that left none by when it found it dead.
        """
        if not self._has_failed:
            self._has_failed = True
            log.error("first failure: %s", cause)
            if is_own:
                self._report(cause)

    def _report(self, cause: str) -> None:
        report_to_launcher(self._place.env, f"ended because of {cause}")

    async def live(self) -> int:
        """Until the end; returns the exit status. Raises StartupError and EngineError."""
        place = self._place
        self._log_place()
        trace = TraceThread(place.address)
        links = await join_launch(place, self._model, trace.endpoint)
        device = DeviceThread(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as tasks:
            if place.has_front_end:
                self._front_end = new_front_end(place, links, self._on_frozen_leader)
                service = HttpService(
                    place,
                    self._front_end,
                    Tracer(links.roster.members, place.rank, links.key),
                    self._signals,
                    self._model,
                    self._source,
                )
                tasks.create_task(service.run(), name="front end")
            running = tasks.create_task(self._run_engine(links, device, trace), name="engine")
        return await self._status(running.result())

    def _log_place(self) -> None:
        place = self._place
        coords = place.layout.coords(place.rank)
        log.info(
            "rank %d in world size %d is assigned as DP rank %d, PP rank %d, PCP rank %d, "
            "TP rank %d, EP rank N/A",
            place.rank,
            place.env.world_size,
            coords.dp,
            coords.pp,
            coords.pcp,
            coords.tp,
        )
        log.info("launcher: %s", " ".join((place.env.kind, place.env.echo)).strip())

    def _on_frozen_leader(self, leader: RankInfo) -> None:
        if self._place.config.kill_frozen:
            kill_if_here(leader, self._place.info.host)

    async def _run_engine(
        self, links: Links, device: DeviceThread, trace: TraceThread
    ) -> Failure | None:
        """Lead or follow until the end; None when it was in order."""
        place = self._place
        watch = new_watch(place, links)
        worker = new_worker(place, self._model, self._source)
        self._engine = new_engine(place, self._model, links, watch, device, worker)
        subject = TraceSubject(self._engine, watch, device)
        loop = asyncio.get_running_loop()
        steps = StepRecorder(loop, self._engine, watch, device)
        trace.start(loop, links.key, place.front_end_ranks, subject.describe, steps)
        async with asyncio.TaskGroup() as tasks:
            settling = tasks.create_task(_settle_when_ready(self._engine), name="collector")
            failure = await self._engine.run()
            settling.cancel()
        if failure is not None:
            is_own = failure.rank == place.rank
            self.say_first_failure(failure.cause, is_own=is_own)
            if is_own and (doing := self._engine.look().where) != IDLE:
                log.error("while in %s\n%s", doing, format_stacks(stacks_of_threads()))
        return failure

    async def _status(self, failure: Failure | None) -> int:
        if failure is None:
            log.info("ended in order")
            return EXIT_OK
        assert self._engine is not None
        is_own = failure.rank == self._place.rank
        if not is_own:
            if self._place.env.kind != "none":
                await wait_first(self._signals.first, limit_s=BLAME_HOLD_S)
            self._report(failure.cause)
        if not self._engine.is_ready:
            return EXIT_STARTUP
        return EXIT_OWN_FAILURE if is_own else EXIT_LOST_PEER


async def _settle_when_ready(engine: Leader | Peer) -> None:
    await engine.ready.wait()
    settle_interpreter()
