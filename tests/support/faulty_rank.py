"""`python -m support.faulty_rank` is `python -m aioengine.launch` with methods that break a rank.

They are called by name through `/collective_rpc`, on every rank; the one whose global rank is given
breaks. It says when on stderr (`fault at SECONDS`, by the clock that all processes of a host have).
Every rank says with which status it ends (`exit status N of rank R`), since torchrun does not.
"""

import contextlib
import os
import socket
import sys
import time
from asyncio import BaseTransport
from typing import Any, NoReturn

import torch

from aioengine import launch
from aioengine.control.channel import Connection
from aioengine.rpc import rpc_method
from aioengine.worker.runner import Worker


class InjectedError(Exception):
    """What a rank was told to raise."""


control_links: list[BaseTransport] = []
"""Every control connection that this rank has had."""


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def say_fault() -> None:
    say(f"fault at {time.monotonic()}")


# --- methods


@rpc_method
def raise_here(worker: Worker, rank: int) -> str:
    """Outside any collective: the caller hears of it, the replica goes on."""
    if worker.rank == rank:
        say_fault()
        raise InjectedError(f"rank {rank} was told to raise")
    return "fine"


@rpc_method
def sum_in_group(worker: Worker, value: float) -> float:
    """Of the ranks of one tp group."""
    assert worker._groups is not None
    return worker._groups.tp.all_reduce(torch.full((8,), value))[0].item()


@rpc_method
def raise_instead_of_collective(worker: Worker, rank: int) -> float:
    """The other ranks of its tp group wait in a collective for the one that raises."""
    raise_here(worker, rank)
    return sum_in_group(worker, 1.0)


@rpc_method
def raise_in_next_forward(worker: Worker, rank: int) -> None:
    """In the middle of a step: its peers wait for what it should have sent."""

    def fail(module: torch.nn.Module, arguments: tuple[Any, ...]) -> NoReturn:
        say_fault()
        raise InjectedError(f"rank {rank} was told to raise in its forward")

    if worker.rank == rank:
        worker.stage.register_forward_pre_hook(fail)


@rpc_method
def exit_now(worker: Worker, rank: int, status: int) -> None:
    if worker.rank == rank:
        say_fault()
        os._exit(status)


@rpc_method
def drop_connections(worker: Worker, rank: int) -> None:
    """Shut down this rank's control connections, as a network between them would."""
    if worker.rank != rank:
        return
    say_fault()
    for transport in control_links:
        link = transport.get_extra_info("socket")
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)


# --- the rank


def note_connections() -> None:
    opened = Connection.connection_made

    def connection_made(self: Connection, transport: BaseTransport) -> None:
        control_links.append(transport)
        opened(self, transport)

    Connection.connection_made = connection_made  # type: ignore[method-assign]


def say_exit_status() -> None:
    leave = os._exit

    def leave_saying(status: int) -> NoReturn:
        say(f"exit status {status} of rank {os.environ['RANK']}")
        leave(status)

    os._exit = leave_saying


if __name__ == "__main__":
    note_connections()
    say_exit_status()
    launch.main()
