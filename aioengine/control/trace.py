"""Every rank's trace thread: says what the rank is in, also while its event loop is blocked.

It has an event loop and a control port of its own. Front ends dial it when somebody asks, with the
same proof as on every other control port, put one question, and hang up.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Final, Protocol, assert_never

from aioengine.control.channel import Connection
from aioengine.control.handshake import ControlPort
from aioengine.control.loop_watch import LoopWatch
from aioengine.control.stacks import stacks_of_threads
from aioengine.errors import EngineError, HandshakeError, StartupError
from aioengine.handshake_messages import Endpoint, Hello
from aioengine.limits import MAX_TRACE_QUESTION_BYTES
from aioengine.timeline.clock import own_clock
from aioengine.trace_messages import (
    AskClock,
    AskStacks,
    AskState,
    AskSteps,
    BeginRecording,
    ClockReading,
    RankStacks,
    RankState,
    RecordedSteps,
    RecordingBegan,
    RecordingRefused,
    TraceQuestion,
)

log = logging.getLogger(__name__)

Describe = Callable[[LoopWatch], RankState]
"""What the rank is in. Called in the trace thread: it may only read, and only what is whole."""
CLOSE_S: Final = 2.0


class StepSource(Protocol):
    """Records this rank's steps (`rank/recording.py`). Called in the trace thread; raises
    EngineError that says why it does not."""

    async def begin_and_wait(self) -> int:
        """Returns the last job that is not recorded."""
        ...

    async def wait_steps(self, wanted: AskSteps) -> RecordedSteps: ...

    def end(self) -> None: ...


class TraceThread:
    """Owns the port from the start, the thread from `start` to `close`. A daemon."""

    def __init__(self, address: str) -> None:
        """Raises StartupError when that is no address here."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise StartupError(
                f"cannot listen on {address} for traces ({error}); --host-ip chooses the address"
            ) from None
        self.endpoint = Endpoint(address, self._socket.getsockname()[1])
        """Where the front ends ask."""
        self._thread: threading.Thread | None = None
        self._is_up = threading.Event()
        self._clock = own_clock()
        self._own_loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._connections: set[Connection] = set()
        self._recording_for: Connection | None = None

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        key: bytes,
        askers: Collection[int],
        describe: Describe,
        steps: StepSource,
    ) -> None:
        """Answer the ranks in `askers`, and watch `loop`."""
        self._steps = steps
        self._watch = LoopWatch(loop)
        self._key = key
        self._askers = askers
        self._describe = describe
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="trace", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """For a process that goes on without its rank."""
        if self._thread is None:
            self._socket.close()
            return
        self._is_up.wait(CLOSE_S)
        self._own_loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S)

    # --- trace thread

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._own_loop = asyncio.get_running_loop()
        self._is_up.set()
        async with asyncio.TaskGroup() as self._tasks:
            tasks = self._tasks
            port = ControlPort(
                tasks,
                self._key,
                max_frame_bytes=MAX_TRACE_QUESTION_BYTES,
                admit=self._admit,
                on_guest=self._on_guest,
            )
            await port.open_on(self._socket)
            watching = tasks.create_task(self._watch.run(), name="watch the loop")
            await self._stop.wait()
            port.close()
            watching.cancel()
            for connection in list(self._connections):
                connection.abort()

    def _admit(self, hello: Hello) -> None:
        if hello.role != "trace" or hello.rank not in self._askers:
            raise HandshakeError(f"rank {hello.rank} as {hello.role} is not expected")

    def _on_guest(self, hello: Hello, connection: Connection) -> None:
        self._connections.add(connection)
        connection.start(
            TraceQuestion,
            lambda question: self._answer(connection, question),
            lambda reason: self._forget(connection),
        )

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._end_recording(connection)
        connection.close()

    def _end_recording(self, connection: Connection) -> None:
        if self._recording_for is connection:
            self._recording_for = None
            self._steps.end()

    def _answer(self, connection: Connection, question: TraceQuestion) -> None:
        match question:
            case AskState():
                connection.send(self._describe(self._watch))
            case AskStacks():
                connection.send(RankStacks(stacks_of_threads(), self._watch.block()))
            case AskClock():
                connection.send(ClockReading(time.monotonic_ns(), self._clock))
            case BeginRecording() | AskSteps():
                self._tasks.create_task(self._record(connection, question), name="recording")
            case _:
                assert_never(question)

    async def _record(self, connection: Connection, question: BeginRecording | AskSteps) -> None:
        try:
            if isinstance(question, AskSteps):
                if self._recording_for is not connection:
                    raise EngineError("nothing is recorded")
                connection.send(await self._steps.wait_steps(question))
                return
            last_seq = await self._steps.begin_and_wait()
        except EngineError as error:
            connection.send(RecordingRefused(str(error)))
            return
        if connection not in self._connections:  # it has ended meanwhile
            self._steps.end()
            return
        self._recording_for = connection
        connection.send(RecordingBegan(last_seq))
