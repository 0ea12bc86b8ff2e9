"""What a rank's device thread is in. The thread writes, heartbeats and traces read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

IDLE: Final = "idle"


class Progress(Protocol):
    """Where something is that runs without Python, and so marks no operation. Any thread reads."""

    @property
    def operation(self) -> str | None: ...

    @property
    def last_operation(self) -> str | None:
        """None where there was none yet."""
        ...


class Activity:
    """Owned by the worker. Other threads may read at any time: each field is whole, but two fields
    may be of two moments.

    Collectives are on the path of every layer, so they mark themselves by plain stores of texts
    made at start-up (0.05 µs a collective): `operation` and `last_operation` going in, `operation`
    coming out. Those of a captured step are found out when somebody asks.
    """

    __slots__ = ("_ending", "job", "last_operation", "operation", "progress", "since", "step")

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
        self.progress: Progress | None = None
        """Of a captured step that is being repeated."""

    def within(self, job: str, step: int = 0) -> "_Job":
        """One job of the device thread: it begins here and ends with the `with`."""
        self.job, self.step, self.since = job, step, time.monotonic()
        return self._ending

    def end(self) -> None:
        """The job is over."""
        self.job, self.step, self.operation = IDLE, 0, None
        self.since = time.monotonic()

    def look(self) -> tuple[str | None, str | None]:
        """`operation` and `last_operation`, those of a captured step included."""
        operation, last_operation, progress = self.operation, self.last_operation, self.progress
        if progress is None:
            return operation, last_operation
        return progress.operation, progress.last_operation or last_operation

    def follow(self, progress: Progress) -> "_Following":
        """A captured step is repeated until the `with` ends."""
        self.progress = progress
        return _Following(self, progress)

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


class _Following:
    """Leaves behind what the step was in at its end: after a failure, what failed."""

    __slots__ = ("_activity", "_progress")

    def __init__(self, activity: Activity, progress: Progress) -> None:
        self._activity = activity
        self._progress = progress

    def __enter__(self) -> None:
        """It has begun."""

    def __exit__(self, *_: object) -> None:
        activity = self._activity
        activity.operation, activity.last_operation = activity.look()
        activity.progress = None
