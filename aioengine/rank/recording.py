"""Records this rank's steps while somebody wants to know where their time goes."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from aioengine.control.watch import Watch
from aioengine.engine.device import DeviceThread, JobError
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.errors import EngineError
from aioengine.timeline.probe import Lane
from aioengine.timeline.recorder import Recorder
from aioengine.trace_messages import AskSteps, RecordedSteps, StepNote


class RecordingRefusedError(EngineError):
    """This rank cannot record now; the message says why."""


class StepRecorder:
    """One recording at a time. Nothing is installed, and nothing is paid for, without one.

    Any thread may call; the work is done on the loop's and on the device thread. On both, probes
    come and go between two jobs, and outside of the replica's sequence: no rank waits for another.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Leader | Peer,
        watch: Watch,
        device: DeviceThread,
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._device = device
        self._watch = watch
        self._lock = threading.Lock()
        self._recording: _Recording | None = None
        watch.failed.add_done_callback(lambda failed: self._fail(failed.result().cause))

    def begin(self) -> None:
        """Returns before the first span is recorded. Raises RecordingRefusedError."""
        self._begin(lambda last_seq: None)

    async def begin_and_wait(self) -> int:
        """Returns the last job that is not recorded, when all later ones are. Of any loop."""
        asking = asyncio.get_running_loop()
        began: asyncio.Future[int] = asking.create_future()

        def resolve(last_seq: int) -> None:
            if not began.done():
                began.set_result(last_seq)

        def on_begun(last_seq: int) -> None:
            with contextlib.suppress(RuntimeError):  # the asking loop is closed
                asking.call_soon_threadsafe(resolve, last_seq)

        self._begin(on_begun)
        try:
            return await began
        except asyncio.CancelledError:
            self.end()
            raise

    async def wait_steps(self, wanted: AskSteps) -> RecordedSteps:
        """As soon as these steps have ended, the replica has failed, or the time is over."""
        recording = self._recording
        if recording is None:
            raise RecordingRefusedError("nothing is recorded")
        over = asyncio.Event()
        recording.tell(wanted, over)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wanted.limit_s):
                await over.wait()
        return recording.recorder.result(recording.error)

    def result(self) -> RecordedSteps:
        """So far."""
        assert self._recording is not None, "nothing is recorded"
        return self._recording.recorder.result(self._recording.error)

    def end(self) -> None:
        """Forget the recording; nothing without one."""
        with self._lock:
            recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the rank has ended
                self._loop.call_soon_threadsafe(self._remove, recording)

    def _begin(self, on_begun: Callable[[int], None]) -> None:
        if not self._engine.is_ready:
            raise RecordingRefusedError("the rank is starting")
        with self._lock:
            if self._recording is not None:
                raise RecordingRefusedError("steps are being recorded for somebody else")
            self._recording = recording = _Recording()
        self._loop.call_soon_threadsafe(self._install, recording, on_begun)

    def _fail(self, cause: str) -> None:
        if (recording := self._recording) is not None:
            recording.fail(cause)

    # --- loop's thread

    def _install(self, recording: "_Recording", on_begun: Callable[[int], None]) -> None:
        if self._watch.failed.done():
            recording.fail(self._watch.failed.result().cause)
            on_begun(0)
            return
        recorder = recording.recorder
        recorder.install(Lane.LOOP, self._engine.loop_probes())
        recorder.watch_jobs(self._device)

        def install() -> None:
            recorder.install(Lane.DEVICE, self._engine.device_probes())

        def on_installed(value: Any, error: JobError | None) -> None:
            if error is not None:
                recording.fail(f"cannot record: {error.type_name}: {error.message}")
            # The outcomes of all jobs before this one have been told.
            on_begun(self._engine.look().last_seq)

        self._device.submit(install, on_installed)

    def _remove(self, recording: "_Recording") -> None:
        recording.recorder.remove(Lane.LOOP)
        self._device.submit(lambda: recording.recorder.remove(Lane.DEVICE), lambda *_: None)


class _Recording:
    """One recording, and who waits for its end."""

    def __init__(self) -> None:
        self.recorder = Recorder(self._on_step)
        self.error = ""
        self._is_stopped = False
        self._waiting: tuple[AskSteps, asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def tell(self, wanted: AskSteps, over: asyncio.Event) -> None:
        """Set `over`, on the loop that runs now, when there is no more to wait for."""
        self._waiting = (wanted, asyncio.get_running_loop(), over)
        self._tell_if_over()

    def fail(self, cause: str) -> None:
        self.error = cause
        self._tell_if_over()

    def stop(self) -> None:
        self._is_stopped = True
        self._tell_if_over()

    def _on_step(self, note: StepNote) -> None:
        """On the device thread."""
        if self._waiting is not None:
            self._tell_if_over()

    def _tell_if_over(self) -> None:
        if self._waiting is None:
            return
        wanted, loop, over = self._waiting
        num_steps = sum(step.seq >= wanted.first_seq for step in self.recorder.steps)
        is_over = bool(self.error) or self._is_stopped or self.recorder.is_full
        if is_over or num_steps >= wanted.num_steps:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(over.set)
