"""Print all threads of all ranks of a launch, also of ranks whose event loop is blocked.

The server must have been started with --admin-api-key.
"""

import argparse
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from aioengine.cli.trace_server import configure, show

__all__ = ["configure", "run"]


def run(args: argparse.Namespace) -> int:
    return show(args, "stacks", print_stacks)


def print_stacks(answer: dict[str, Any], out: TextIO) -> None:
    console = Console(file=out, markup=False, highlight=False, emoji=False, soft_wrap=True)
    for rank in answer["ranks"]:
        who = f"rank {rank['rank']} ({rank['coords']}) host {rank['host']} pid {rank['pid']}"
        console.print(Text(f"=== {who}", style="bold"))
        if rank["error"] is not None:
            console.print(Text(rank["error"], style="red"))
            continue
        _print_threads(console, rank["threads"], "")
        if (block := rank["loop_block"]) is not None:
            console.print(Text(_describe(block), style="yellow"))
            _print_threads(console, block["threads"], "then: ")


def _describe(block: dict[str, Any]) -> str:
    lasted = f"{block['lasted_seconds']:.1f} s"
    if not block["is_over"]:
        return f"the event loop has been blocked for {lasted}; where it was at the beginning:"
    return (
        f"the event loop was blocked for {lasted}, until {block['ended_seconds_ago']:.0f} s ago; "
        "where it was then:"
    )


def _print_threads(console: Console, threads: list[dict[str, str]], prefix: str) -> None:
    for thread in threads:
        console.print(Text(f"--- {prefix}thread {thread['thread']}", style="cyan"))
        console.print(Text(thread["stack"].rstrip()))
