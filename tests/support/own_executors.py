"""Executors as a user would write them, right and wrong ones."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from aioengine.engine.executor import Executor
from aioengine.engine.executor_backend import ExecutorBackend
from aioengine.messages import Heartbeat, RemoteCall, StepPlan

log = logging.getLogger(__name__)


class CountingExecutor(Executor):
    """Ours, and a line in the log for what it has sent."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.num_plans = 0
        self.calls: list[str] = []

    def submit(self, plan: StepPlan) -> None:
        self.num_plans += 1
        super().submit(plan)

    async def call(self, method: str, **kwargs: Any) -> list[Any]:
        self.calls.append(method)
        return await super().call(method, **kwargs)

    async def remote_call(self, call: RemoteCall, timeout_s: float | None) -> Any:
        self.calls.append(call.method)
        return await super().remote_call(call, timeout_s)

    async def shut_down(self, timeout_s: float) -> None:
        log.info("%d plans; calls: %s", self.num_plans, " ".join(self.calls))
        await super().shut_down(timeout_s)


class Forwarding:
    """No subclass: it owns one of ours and passes everything on."""

    def __init__(self, **parts: Any) -> None:
        self._inner = Executor(**parts)

    @property
    def num_in_flight(self) -> int:
        return self._inner.num_in_flight

    @property
    def last_beat(self) -> Heartbeat:
        return self._inner.last_beat


def forward(name: str) -> Callable[..., Any]:
    def method(self: Forwarding, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    async def async_method(self: Forwarding, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._inner, name)(*args, **kwargs)

    return async_method if name in ASYNC else method


ASYNC = {"call", "remote_call", "shut_down", "announce_failure"}
PLAIN = {"late_step", "submit", "look", "send_heartbeats", "broadcast", "unanswered"}
for method_name in ASYNC | PLAIN:
    setattr(Forwarding, method_name, forward(method_name))


class Empty: ...


class Declared(ExecutorBackend):
    def submit(self, plan: StepPlan) -> None: ...


class Unfinished(Executor, ABC):
    @abstractmethod
    def submit(self, plan: StepPlan) -> None: ...


class OtherArguments(Executor):
    def __init__(self, watch: Any, address: str) -> None: ...


class NoConstructor(Forwarding):
    __init__ = object.__init__  # type: ignore[assignment]


class OtherMethods(Executor):
    def submit(self) -> None: ...  # type: ignore[override]

    def call(self, method: str, **kwargs: Any) -> list[Any]:  # type: ignore[override]
        return []

    look = 3  # type: ignore[assignment]


no_class = CountingExecutor.submit
