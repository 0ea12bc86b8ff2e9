"""Trace threads without a rank behind them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.replicas import info

from aioengine.control.loop_watch import LoopWatch
from aioengine.control.trace import TraceThread
from aioengine.errors import EngineError
from aioengine.handshake_messages import Member
from aioengine.messages import Heartbeat
from aioengine.trace_messages import AskSteps, RankState, RecordedSteps

KEY = b"the key of this attempt"
HOST = "127.0.0.1"


def state(watch: LoopWatch | None = None, **fields: Any) -> RankState:
    defaults: dict[str, Any] = {
        "pulse": Heartbeat(12, "step 13", "all_reduce of tp:0 [ranks 0, 1]", 0.5, 13),
        "last_operation": "all_reduce of tp:0 [ranks 0, 1]",
        "num_queued": 2,
        "num_running": 3,
        "num_waiting": 4,
        "loop_lag_s": 0.001,
        "max_loop_lag_s": 0.25,
        "rss_bytes": 5 * 2**20,
        "num_fds": 6,
        "num_threads": 7,
        "uptime_s": 8.0,
        "heard": (),
    }
    return RankState(**(defaults | fields))


class FakeSteps:
    """Records nothing, for ever, until `give` says what it has. Used in the trace thread."""

    def __init__(self, last_seq: int = 4) -> None:
        self.last_seq = last_seq
        self.is_recording = False
        self.asked: list[AskSteps] = []
        self.is_asked = threading.Event()
        self.ended = threading.Event()
        self.given: RecordedSteps | None = None

    async def begin_and_wait(self) -> int:
        if self.is_recording:
            raise EngineError("busy")
        self.is_recording = True
        return self.last_seq

    async def wait_steps(self, wanted: AskSteps) -> RecordedSteps:
        self.asked.append(wanted)
        self.is_asked.set()
        if self.given is None:
            await asyncio.Event().wait()
        assert self.given is not None
        return self.given

    def end(self) -> None:
        self.is_recording = False
        self.ended.set()


@contextmanager
def trace_thread(
    rank: int = 0,
    *,
    key: bytes = KEY,
    askers: tuple[int, ...] = (0,),
    steps: "FakeSteps | None" = None,
    **fields: Any,
) -> Iterator[Member]:
    """It watches the running loop, and says what `state` says."""
    trace = TraceThread(HOST)
    loop = asyncio.get_running_loop()
    source = steps or FakeSteps()
    trace.start(loop, key, askers, lambda watch: state(watch, **fields), source)
    try:
        yield Member(info=info(rank), node="0", endpoint=None, config=b"", trace=trace.endpoint)
    finally:
        trace.close()
