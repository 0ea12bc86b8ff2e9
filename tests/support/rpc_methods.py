"""Functions that tests call on every rank; each gets the rank's (fake) worker first."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import msgspec

GATE = threading.Event()
"""Holds `wait_for_gate` back on every rank."""
LIMIT_S = 5.0


def echo(worker: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return [worker.rank, args, kwargs]


def rank_of(worker: Any) -> int:
    rank: int = worker.rank
    return rank


def fail_on(worker: Any, rank: int) -> str:
    if worker.rank == rank:
        raise KeyError(f"rank {rank} was told to fail")
    return "fine"


def wait_for_gate(worker: Any, value: str, first_rank: int = 0) -> str:
    if worker.rank >= first_rank:
        assert GATE.wait(LIMIT_S), "the test left its gate closed"
    return f"{value} of {worker.rank}"


def order_of(worker: Any, number: int) -> list[int]:
    """The numbers that this rank has been called with, in order."""
    worker.numbers = [*getattr(worker, "numbers", []), number]
    numbers: list[int] = worker.numbers
    return numbers


# --- what a method may raise ---------------------------------------------------------------------


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt(),
    "huge": lambda: ValueError("x" * 2**24),
    "surrogate": lambda: ValueError("name \udcff"),
    "unreadable": UnreadableError,
    "stop": lambda: StopIteration(1),
}


def raise_on(worker: Any, rank: int, kind: str) -> None:
    if worker.rank == rank:
        raise ERRORS[kind]()


def overflow_on(worker: Any, rank: int) -> None:
    if worker.rank == rank:
        overflow_on(worker, rank)


# --- what a method may return --------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "object": object,
    "surrogate": lambda: "\udcff",
    "endless": lambda: nested(100_000),
    "large integer": lambda: 2**64,
}


def malformed_on(worker: Any, rank: int) -> Any:
    return msgspec.Raw(b"\xc1") if worker.rank == rank else None


def return_on(worker: Any, rank: int, kind: str) -> Any:
    return VALUES[kind]() if worker.rank == rank else None


def nested_list(worker: Any, depth: int) -> list[Any]:
    return nested(depth)


def some_bytes(worker: Any, num_bytes: int) -> bytes:
    return bytes(num_bytes)


def length_of(worker: Any, data: bytes) -> int:
    return len(data)


def decorate(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def decorated(worker: Any) -> int:
        return function(worker) + 100

    return decorated


@decorate
def decorated_rank_of(worker: Any) -> int:
    rank: int = worker.rank
    return rank


async def suspends(worker: Any) -> None: ...
