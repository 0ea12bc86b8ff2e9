"""Trace threads without a rank behind them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.replicas import info

from aioengine.control.loop_watch import LoopWatch
from aioengine.control.trace import TraceThread
from aioengine.messages import Heartbeat, Member
from aioengine.trace_messages import RankState

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


@contextmanager
def trace_thread(
    rank: int = 0, *, key: bytes = KEY, askers: tuple[int, ...] = (0,), **fields: Any
) -> Iterator[Member]:
    """It watches the running loop, and says what `state` says."""
    trace = TraceThread(HOST)
    loop = asyncio.get_running_loop()
    trace.start(loop, key, askers, lambda watch: state(watch, **fields))
    try:
        yield Member(info=info(rank), node="0", endpoint=None, config=b"", trace=trace.endpoint)
    finally:
        trace.close()
