"""The engine of a rank that belongs to a trainer, from its start to its end. Engine's thread.

As `rank/rank.py`, without what makes a process: no HTTP, no signals, no exit status. What fails is
told to whoever calls; the trainer's process goes on.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from aioengine.control.deadline import wait_first
from aioengine.control.watch import Failure, Watch
from aioengine.embedded.requests import Requests
from aioengine.engine.device import DeviceThread
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.errors import EngineError, ReplicaFailedError, StartupError, innermost
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.text import TextPool
from aioengine.rank.joining import join_launch
from aioengine.rank.model_files import find_model, load_text
from aioengine.rank.place import Place
from aioengine.rank.recording import StepRecorder
from aioengine.rank.roles import new_engine, new_front_end, new_watch, new_worker

log = logging.getLogger(__name__)

OnFailure = Callable[[EngineError], None]


class EngineHost:
    """Owns a rank's links, device thread, engine and front end while `live` runs."""

    def __init__(self, place: Place, on_failure: OnFailure | None) -> None:
        self._place = place
        self._on_failure = on_failure
        self._watch: Watch | None = None
        self._front_end: FrontEnd | None = None
        self._is_ready = asyncio.Event()
        self._is_leaving = False
        """The program has left the engine."""
        self._may_end = asyncio.Event()
        """It has left in order."""
        self.engine: Leader | Peer
        """From ready on."""
        self.recorder: StepRecorder
        """From ready on."""
        self.requests: Requests | None = None
        """On leaders, from ready on."""
        self.end_error: Exception | None = None
        """What calls get once `live` has ended."""

    async def live(self) -> None:
        """Until the program leaves, or the first failure. Raises nothing: see `end_error`."""
        try:
            failure = await self._live()
            self.end_error = EngineError("the engine is closed")
            if failure is not None:
                self.end_error = ReplicaFailedError(failure.cause)
        except asyncio.CancelledError:
            when = "" if self._is_ready.is_set() else " while it started"
            self.end_error = StartupError(f"the engine was stopped{when}")
        except Exception as caught:
            error = innermost(caught)
            if self._is_ready.is_set():
                log.error("this rank's engine failed", exc_info=error)
                assert self._watch is not None
                cause = f"{self._place.info}: {type(error).__name__}: {error}"
                self._watch.fail(cause, self._place.rank)
                error = ReplicaFailedError(self._watch.failed.result().cause)
            self.end_error = error

    async def wait_ready(self) -> None:
        """When `live` ends first, so does the loop that this runs in."""
        await self._is_ready.wait()

    def leave(self, reason: str | None) -> None:
        """The program leaves the engine; `reason` is what went wrong there. `live` then ends:
        a leader's at once, a peer's with that of its leader."""
        self._is_leaving = True
        assert self._watch is not None
        if reason is None:
            self._may_end.set()
        else:
            self._watch.fail(f"{self._place.info}: {reason}", self._place.rank)

    async def enter_phase(self, timeout_s: float | None) -> None:
        await self.engine.phases.enter(timeout_s)

    def begin_leaving_phase(self) -> None:
        """Nobody needs to wait for the end: what comes next does. Nothing outside of phases."""
        if isinstance(self.engine, Peer):
            self.engine.phases.begin_leaving()
        elif self.engine.phases.begin_leaving():
            assert self.requests is not None
            self.requests.end_streams("the program has left active()")
            # The leader gets the aborts before the end of the phase.
            asyncio.get_running_loop().call_soon(self.engine.end_phase)

    async def leave_phase(self) -> None:
        """Returns when no rank of the replica computes any more."""
        self.begin_leaving_phase()
        await self.engine.phases.wait_left()

    # --- internals

    async def _live(self) -> Failure | None:
        place, model, source = find_model(self._place)
        self._place = place
        log.info("rank %d: the engine joins as %s", place.rank, place.info.coords)
        with contextlib.ExitStack() as stack:
            device = DeviceThread(asyncio.get_running_loop())
            stack.callback(device.close)
            links = await join_launch(place, model)
            stack.callback(links.close)
            self._watch = new_watch(place, links)
            self._watch.pause()
            self._watch.failed.add_done_callback(self._tell_program)
            worker = new_worker(place, model, source)
            self.engine = new_engine(
                place, model, links, self._watch, device, worker, is_embedded=True
            )
            self.recorder = StepRecorder(
                asyncio.get_running_loop(), self.engine, self._watch, device
            )
            stack.callback(device.abandon, worker)
            text = TextPool()
            stack.callback(text.close)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self.engine.run(), name="engine")
                leaving = tasks.create_task(self._end_when_left(), name="leaving")
                if isinstance(self.engine, Leader):
                    self._front_end = new_front_end(place, links, on_frozen=lambda leader: None)
                    self._front_end.start()
                    self.requests = Requests(
                        self.engine,
                        self._front_end,
                        place.layout.coords(place.rank).dp,
                        self._watch,
                        await load_text(place, model, source, text),
                        text,
                        tasks,
                        place.config.seed,
                    )
                failure = await self._until_ended(running)
                leaving.cancel()
                if self.requests is not None:
                    self.requests.end_all("the engine is closed")
                return failure

    async def _end_when_left(self) -> None:
        await self._may_end.wait()
        if isinstance(self.engine, Peer):
            self.engine.phases.leave_engine()
            return
        assert self._front_end is not None
        with contextlib.suppress(EngineError):  # of a replica that has failed
            await self.engine.phases.wait_left()
        await self._front_end.shut_down()

    async def _until_ended(self, running: "asyncio.Task[Failure | None]") -> Failure | None:
        """Raises StartupError when the end comes before the replica is ready."""
        ended = asyncio.Event()
        running.add_done_callback(lambda _: ended.set())
        front_end = self._front_end
        await wait_first(self.engine.ready if front_end is None else front_end.started, ended)
        if ended.is_set():
            failure = running.result()
            raise StartupError("the leader has left" if failure is None else failure.cause)
        log.info("rank %d: the engine is ready", self._place.rank)
        self._is_ready.set()
        return await running

    def _tell_program(self, failed: "asyncio.Future[Failure]") -> None:
        """The watch has its first failure, and only one."""
        if self._on_failure is None or self._is_leaving or not self._is_ready.is_set():
            return
        try:
            self._on_failure(failed.result().error)
        except BaseException:  # SystemExit would end this loop, and not the process
            log.exception("on_failure raised")
