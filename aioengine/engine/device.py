"""The device thread: the only thread that touches torch, and the way in and out of it.

In: a SimpleQueue. Out: a SimpleQueue and an eventfd that the loop watches; waking the loop this
way costs half of `call_soon_threadsafe`.
"""

import asyncio
import ctypes
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, Self

from aioengine.activity import Activity
from aioengine.errors import WorkerError
from aioengine.limits import MAX_ERROR_CHARS, MAX_TRACEBACK_CHARS
from aioengine.messages import JobFailed, RemoteCall, RemoteFailed, StepPlan, StepResult
from aioengine.timeline.probe import AnyProbe

log = logging.getLogger(__name__)

JOIN_S: Final = 2.0
_eventfd_write: Final = ctypes.PyDLL(None, use_errno=True).eventfd_write
"""Keeps the interpreter lock, which `os.eventfd_write` lets go: the loop would take it right there,
and the device wait for the loop's whole turn before it begins the next step. This way the loop's
turn comes when the device is in its first kernel."""
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class DeviceWorker(Protocol):
    """What runs on the device thread (`worker/runner.py`). Every method blocks."""

    activity: Activity
    """What the thread is in; read from other threads."""

    def prepare(self, seq: int, plan: StepPlan) -> None:
        """Called when a plan has arrived, before the jobs ahead of it are done: post receives."""

    def execute(self, seq: int, plan: StepPlan) -> StepResult | None:
        """Compute one step. The output rank returns its result, the others None."""

    def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        """Run a registered method."""

    def remote(self, seq: int, call: RemoteCall) -> bytes:
        """Run the method of a `collective_rpc`; msgpack of its value, empty when not wanted."""

    def probes(self) -> Sequence[AnyProbe]:
        """What of a step can be timed, once the replica is ready."""


@dataclass(frozen=True, slots=True)
class JobError:
    """An exception on the device thread, as text: the object would hold frames and tensors."""

    type_name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Text that fits a control frame, whatever the exception says."""
        return cls(
            _portable(lambda: type(error).__name__, MAX_ERROR_CHARS),
            _portable(lambda: str(error), MAX_ERROR_CHARS),
            _portable(lambda: "".join(traceback.format_exception(error)), MAX_TRACEBACK_CHARS),
        )

    def as_message(self, seq: int) -> JobFailed:
        return JobFailed(seq, self.type_name, self.message, self.traceback)

    def as_remote_failure(self, seq: int) -> RemoteFailed:
        return RemoteFailed(seq, self.type_name, self.message, self.traceback)


OnDone = Callable[[Any, JobError | None], None]


@dataclass(frozen=True, slots=True)
class _Task:
    run: Callable[[], Any]
    prepare: Callable[[], None] | None
    on_done: OnDone


class DeviceThread:
    """Runs tasks one after the other, in the order of `submit`. A daemon: it never delays exit.

    Owned by one rank; `submit` and `run` are called on the loop's thread, where `on_done` is
    called, too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.num_unfinished = 0
        """Tasks that were submitted and whose `on_done` was not called yet."""
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[OnDone, Any, JobError | None]] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._wake_fd, self._deliver)
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread behind the tasks that are queued; what they give is lost.

        Waits a moment, as a thread that runs when the interpreter ends makes C++ abort. One that is
        stuck in a collective stays.
        """
        self._loop.remove_reader(self._wake_fd)
        self._tasks.put(None)
        self._thread.join(JOIN_S)

    def submit(
        self, run: Callable[[], Any], on_done: OnDone, prepare: Callable[[], None] | None = None
    ) -> None:
        """Queue a task. `prepare` runs as soon as the thread sees the task, before earlier tasks
        that still wait."""
        self.num_unfinished += 1
        self._tasks.put(_Task(run, prepare, on_done))

    def abandon(self, worker: DeviceWorker) -> None:
        """For a process that goes on, when the engine has ended: frees what a failure has left of
        this rank's groups, as soon as the thread gets to it."""
        self.submit(lambda: worker.call("abandon", {}), lambda *_: None)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Queue a call and wait for its value. Raises WorkerError when it raised."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def on_done(value: Any, error: JobError | None) -> None:
            if future.done():
                return
            if error is not None:
                name = getattr(function, "__name__", "device call")
                future.set_exception(
                    WorkerError(name, error.type_name, error.message, error.traceback)
                )
            else:
                future.set_result(value)

        self.submit(lambda: function(*args), on_done)
        return await future

    # --- device thread

    def _main(self) -> None:
        waiting: deque[tuple[_Task, JobError | None] | None] = deque()
        while True:
            if not waiting:
                waiting.append(self._prepared(self._tasks.get()))
            self._take_arrived(waiting)
            if (next_task := waiting.popleft()) is None:
                os.close(self._wake_fd)
                return
            task, error = next_task
            value = None
            if error is None:
                value, error = _attempt(task.run)
            self._outcomes.put((task.on_done, value, error))
            if _eventfd_write(self._wake_fd, 1):  # it never blocks
                raise OSError(ctypes.get_errno(), "cannot wake the loop")

    def _take_arrived(self, waiting: deque[tuple[_Task, JobError | None] | None]) -> None:
        while True:
            try:
                waiting.append(self._prepared(self._tasks.get_nowait()))
            except Empty:
                return

    def _prepared(self, task: _Task | None) -> tuple[_Task, JobError | None] | None:
        if task is None:
            return None
        if task.prepare is None:
            return task, None
        return task, _attempt(task.prepare)[1]

    # --- loop thread

    def _deliver(self) -> None:
        os.eventfd_read(self._wake_fd)
        while True:
            try:
                on_done, value, error = self._outcomes.get_nowait()
            except Empty:
                return
            self.num_unfinished -= 1
            try:
                on_done(value, error)
            except BaseException:
                os.eventfd_write(self._wake_fd, 1)  # the outcomes behind this one come, too
                raise


def _attempt(function: Callable[[], Any]) -> tuple[Any, JobError | None]:
    try:
        return function(), None
    except BaseException as error:  # whatever it is, the loop decides what becomes of the replica
        return None, JobError.of(error)


def _portable(make_text: Callable[[], str], max_chars: int) -> str:
    """The text without what UTF-8 cannot say, and without its middle where it is too long."""
    try:
        text = make_text()
        if len(text) > max_chars:
            half = max_chars // 2
            text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
        return text.encode(errors="backslashreplace").decode()
    except BaseException as error:  # of a __str__ that is not ours
        return f"its text cannot be made: {type(error).__name__}"
