"""What a rank's heartbeats say of its device thread, and the probes that find it stuck."""

import logging
import time
from typing import Any

from aioengine.activity import Activity
from aioengine.control.stacks import format_stacks, stacks_of_threads
from aioengine.control.watch import MAX_UNANSWERED_BEATS
from aioengine.engine.device import DeviceThread, JobError
from aioengine.messages import Heartbeat

log = logging.getLogger(__name__)


class Pulse:
    """Makes one rank's heartbeats. Loop thread only, but for `look`.

    A device thread without work gets a probe with every beat: a task that does nothing. It is not
    part of the replica's sequence, so that it needs nothing from other ranks; each rank probes
    itself, because only its own loop knows for sure that the thread has nothing to do (the leader
    would blame a rank for a `collective_rpc` whose caller has given up). An unanswered probe is
    counted in beats, not in seconds: a process that was stopped for a minute has missed one.
    """

    def __init__(self, device: DeviceThread, activity: Activity) -> None:
        self._device = device
        self._activity = activity
        self._is_probing = False
        self._num_unanswered = 0

    def beat(self, last_seq: int) -> Heartbeat:
        """The next heartbeat; `last_seq` is the last completed job."""
        if self._is_probing:
            self._num_unanswered += 1
            if self._num_unanswered == MAX_UNANSWERED_BEATS:
                log.error(
                    "the device thread has nothing to do and does not answer\n%s",
                    format_stacks(stacks_of_threads()),
                )
        elif not self._device.num_unfinished:
            self._is_probing = True
            self._device.submit(_nothing, self._on_answer)
        return self.look(last_seq)

    def look(self, last_seq: int) -> Heartbeat:
        """The same without a probe. Any thread."""
        activity = self._activity
        return Heartbeat(
            last_seq,
            activity.job,
            activity.look()[0] or "",
            time.monotonic() - activity.since,
            activity.step,
            self._num_unanswered,
        )

    def _on_answer(self, value: Any, error: JobError | None) -> None:
        self._is_probing = False
        self._num_unanswered = 0


def _nothing() -> None:
    """The probe."""
