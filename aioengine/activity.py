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

    __slots__ = ("job", "last_operation", "operation", "since", "step")

    def __init__(self) -> None:
        self.job = IDLE
        self.step = 0
        """Sequence number of the plan that is computed; 0 outside of steps."""
        self.since = time.monotonic()
        """When `job` began, on the monotonic clock."""
        self.operation: str | None = None
        """What moves data or waits for it, and with whom, inside the job."""
        self.last_operation: str | None = None
        """The latest one, whether it has ended or not."""

    @contextmanager
    def within(self, job: str, step: int = 0) -> Iterator[None]:
        """One job of the device thread."""
        self.job, self.step, self.since = job, step, time.monotonic()
        try:
            yield
        finally:
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
