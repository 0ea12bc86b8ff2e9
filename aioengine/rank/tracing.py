"""What this rank's trace thread tells."""

import os
import threading
from pathlib import Path

from aioengine.control.deadline import process_age_s
from aioengine.control.loop_watch import LoopWatch
from aioengine.control.watch import Watch
from aioengine.engine.device import DeviceThread
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.trace_messages import HeardBeat, RankState


class TraceSubject:
    """This rank, as its trace thread sees it: attributes of others, read without their doing."""

    def __init__(self, engine: Leader | Peer, watch: Watch, device: DeviceThread) -> None:
        self._engine = engine
        self._watch = watch
        self._device = device

    def describe(self, loop_watch: LoopWatch) -> RankState:
        """Called in the trace thread."""
        engine, me = self._engine, self._watch.me
        load = engine.load if isinstance(engine, Leader) else None
        return RankState(
            pulse=engine.look(),
            last_operation=engine.activity.look()[1] or "",
            num_queued=self._device.num_unfinished,
            num_running=load.num_running if load is not None else None,
            num_waiting=load.num_waiting if load is not None else None,
            loop_lag_s=loop_watch.lag_s,
            max_loop_lag_s=loop_watch.max_lag_s,
            rss_bytes=_rss_bytes(),
            num_fds=len(os.listdir("/proc/self/fd")),
            num_threads=threading.active_count(),
            uptime_s=process_age_s(),
            heard=tuple(
                HeardBeat(info.rank, sign.beat, sign.age_s)
                for info, sign in self._watch.signs().items()
                if sign is not None and info != me
            ),
        )


def _rss_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")
