"""Print what every rank of a launch is in: its step, its queue, its last collective, its loop.

A rank that does not answer is listed with what its last heartbeat said. The server must have been
started with --admin-api-key.
"""

import argparse
from collections.abc import Callable
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aioengine.cli.trace_server import configure, show

__all__ = ["configure", "run"]

PIPED_WIDTH: Final = 400
"""For output that is no terminal: nothing is cut."""
LATE_S: Final = 0.5
"""A loop that was late by more stands out."""
COLUMNS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "rank": lambda rank: f"{rank['rank']} ({rank['coords']})",
    "host pid": lambda rank: f"{rank['host']} {rank['pid']}",
    "replica": lambda rank: rank["replica"],
    "step": lambda rank: str(rank["last_step"]),
    "device thread": lambda rank: _doing(rank),
    "jobs": lambda rank: str(rank["num_queued"]),
    "run/wait": lambda rank: _load(rank),
    "last operation": lambda rank: rank["last_operation"] or "-",
    "loop lag": lambda rank: _lag(rank),
    "memory": lambda rank: f"{rank['rss_bytes'] / 2**20:.0f} MiB",
    "fds": lambda rank: str(rank["num_fds"]),
    "up": lambda rank: f"{rank['uptime_seconds']:.0f} s",
}


def run(args: argparse.Namespace) -> int:
    return show(args, "state", print_state)


def print_state(answer: dict[str, Any], out: TextIO) -> None:
    """One row per rank that answers, one line per rank that does not."""
    width = None if out.isatty() else PIPED_WIDTH
    console = Console(file=out, width=width, markup=False, highlight=False, emoji=False)
    console.print(f"status: {answer['status']}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name)
    silent = []
    for rank in answer["ranks"]:
        if rank["error"] is not None:
            silent.append(rank)
            continue
        is_late = rank["max_loop_lag_seconds"] > LATE_S
        style = "yellow" if is_late or rank["replica"] == "failed" else ""
        table.add_row(*(Text(cell(rank)) for cell in COLUMNS.values()), style=style)
    if table.row_count:
        console.print(table)
    for rank in silent:
        console.print(Text(describe_silent(rank), style="red"))


def describe_silent(rank: dict[str, Any]) -> str:
    who = f"rank {rank['rank']} ({rank['coords']}) host {rank['host']} pid {rank['pid']}"
    last = rank["last_heartbeat"]
    if last is None:
        return f"{who}: {rank['error']}; no heartbeat was heard"
    return (
        f"{who}: {rank['error']}; its last heartbeat, {last['seconds_ago']:.1f} s ago: in "
        f"{_doing(last)}, job {last['last_step']} done"
    )


def _doing(rank: dict[str, Any]) -> str:
    what = rank["doing"] + (f", {rank['operation']}" if rank["operation"] else "")
    return f"{what} for {rank['doing_seconds']:.1f} s"


def _load(rank: dict[str, Any]) -> str:
    running, waiting = rank["num_requests_running"], rank["num_requests_waiting"]
    return "-" if running is None else f"{running}/{waiting}"


def _lag(rank: dict[str, Any]) -> str:
    now, most = rank["loop_lag_seconds"], rank["max_loop_lag_seconds"]
    return f"{now * 1e3:.1f} ms, max {most * 1e3:.0f}"
