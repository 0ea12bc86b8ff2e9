"""Functions that tests call on every rank; each gets the rank's (fake) worker first."""

import threading
from typing import Any

GATE = threading.Event()
"""Holds `wait_for_gate` back on ranks above 0."""
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


def wait_for_gate(worker: Any, value: str) -> str:
    if worker.rank > 0:
        assert GATE.wait(LIMIT_S), "the test left its gate closed"
    return f"{value} of {worker.rank}"


def an_object(worker: Any) -> object:
    return object()
