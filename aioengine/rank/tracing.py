"""What this rank's trace thread tells."""

import os
import threading
from pathlib import Path

from aioengine.control.deadline import process_age_s
from aioengine.control.loop_watch import LoopWatch
from aioengine.control.watch import Watch
from aioengine.engine.device import DeviceThread, DeviceWorker
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.messages import HeardBeat, Heartbeat, RankState


class TraceSubject:
    """This rank, as its trace thread sees it: attributes of others, read without their doing."""

    def __init__(self, device: DeviceThread, worker: DeviceWorker) -> None:
        self._device = device
        self._activity = worker.activity
        self._engine: Leader | Peer | None = None
        self._watch: Watch | None = None

    def follow(self, engine: Leader | Peer, watch: Watch) -> None:
        """The roles have begun."""
        self._watch = watch
        self._engine = engine

    def describe(self, loop_watch: LoopWatch) -> RankState:
        """Called in the trace thread."""
        engine, watch = self._engine, self._watch
        load = engine.load if isinstance(engine, Leader) else None
        return RankState(
            pulse=engine.look() if engine is not None else Heartbeat(doing=self._activity.job),
            last_operation=self._activity.last_operation or "",
            num_queued=self._device.num_unfinished,
            num_running=load.num_running if load else None,
            num_waiting=load.num_waiting if load else None,
            loop_lag_s=loop_watch.lag_s,
            max_loop_lag_s=loop_watch.max_lag_s,
            rss_bytes=_rss_bytes(),
            num_fds=len(os.listdir("/proc/self/fd")),
            num_threads=threading.active_count(),
            uptime_s=process_age_s(),
            heard=tuple(
                HeardBeat(info.rank, sign.beat, sign.age_s)
                for info, sign in (watch.signs() if watch is not None else {}).items()
                if sign is not None and watch is not None and info is not watch.me
            ),
        )


def _rss_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")
