"""What a rank's device thread is in. The thread writes, heartbeats and traces read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

IDLE: Final = "idle"


class Activity:
    """Owned by the worker. Other threads may read at any time: each field is whole, but two fields
    may be of two moments.

    Collectives are on the path of every layer, so they mark themselves by plain stores of texts
    made at start-up (0.05 µs a collective): `operation` and `last_operation` going in, `operation`
    coming out.
    """

    __slots__ = ("_ending", "job", "last_operation", "operation", "since", "step")

    def __init__(self) -> None:
        self._ending = _Job(self)
        self.job = IDLE
        self.step = 0
        """Sequence number of the plan that is computed; 0 outside of steps."""
        self.since = time.monotonic()
        """When `job` began, on the monotonic clock."""
        self.operation: str | None = None
        """What moves data or waits for it, and with whom, inside the job."""
        self.last_operation: str | None = None
        """The latest one, whether it has ended or not."""

    def within(self, job: str, step: int = 0) -> "_Job":
        """One job of the device thread: it begins here and ends with the `with`."""
        self.job, self.step, self.since = job, step, time.monotonic()
        return self._ending

    def end(self) -> None:
        """The job is over."""
        self.job, self.step, self.operation = IDLE, 0, None
        self.since = time.monotonic()

    @contextmanager
    def operating(self, operation: str) -> Iterator[None]:
        """An operation that is too rare to count every store."""
        self.operation = self.last_operation = operation
        try:
            yield
        finally:
            self.operation = None


class _Job:
    """Ends what the device thread is in. On the path of every step, so no generator."""

    __slots__ = ("_activity",)

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        """It has begun."""

    def __exit__(self, *_: object) -> None:
        self._activity.end()
