"""What `aioengine bench serve` found, for people (tables) and for programs (one JSON object)."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from aioengine.bench.load import Server, Workload
from aioengine.bench.stats import (
    LATENCIES,
    MAX_CLIENT_SHARE,
    RATES,
    Round,
    Summary,
    compare,
    summarize,
)

PIPED_WIDTH: Final = 160
"""Columns where no terminal says how many there are."""


def print_summary(server: Server, summary: Summary, num_rounds: int) -> None:
    console = _console()
    counted = "" if summary.is_exact else " (events: the server counts no tokens)"
    rounds = "" if num_rounds == 1 else f" in {num_rounds} rounds"
    num_failed = sum(summary.failures.values())
    console.print(
        f"{server.url} {server.model}\n"
        f"{summary.num_requests - num_failed} of {summary.num_requests} requests{rounds}, "
        f"{summary.wall_s:.1f} s · {summary.num_prompt_tokens:,} tokens in, "
        f"{summary.num_output_tokens:,} out{counted}",
        soft_wrap=True,
    )
    shown = " · ".join(f"{summary.rates[name]:,.2f} {label}" for name, label in RATES.items())
    console.print(shown, soft_wrap=True)
    table = _table("", "mean", "median", "p90", "p99")
    for name, found in summary.latencies.items():
        figures = (found.mean, found.median, found.p90, found.p99)
        table.add_row(LATENCIES[name], *(f"{figure:,.2f}" for figure in figures))
    console.print(table)
    for line in _notes(summary):
        console.print(line, soft_wrap=True)
    console.print()


def _notes(summary: Summary) -> list[str]:
    lines = [f"failed {count}×: {reason}" for reason, count in summary.failures.items()]
    if summary.num_short:
        lines.append(f"{summary.num_short} answers ended before the tokens that were asked for")
    share = f"the client used {summary.client_share:.0%} of a core"
    if summary.is_client_limit:
        share = (
            f"warning: {share}, above {MAX_CLIENT_SHARE:.0%}: it may be what limits these figures"
        )
    return [*lines, share]


def print_comparison(servers: Sequence[Server], rounds: Sequence[Sequence[Round]]) -> None:
    console = _console()
    console.print(f"{servers[0].url} against {servers[1].url}: medians of rounds, by turns")
    table = _table("", "first", "second", "first / second", "least", "most")
    for row in compare(*rounds):
        figures = (f"{row.first:,.2f}", f"{row.second:,.2f}", f"{row.ratio:.3f}")
        table.add_row(row.name, *figures, f"{row.least:.3f}", f"{row.most:.3f}")
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _console() -> Console:
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def to_json(work: Workload, servers: Sequence[Server], rounds: Sequence[Sequence[Round]]) -> bytes:
    """One object: workload; servers (url, model, summary of all rounds, rounds); comparison (with
    two servers). Rates are per second, latencies in ms."""
    described: dict[str, Any] = {
        "workload": asdict(work)
        | {"input_len": str(work.input_len), "output_len": str(work.output_len)},
        "servers": [
            {
                "url": server.url,
                "model": server.model,
                "summary": asdict(summarize(each)),
                "rounds": [asdict(summarize([one])) for one in each],
            }
            for server, each in zip(servers, rounds, strict=True)
        ],
    }
    if len(rounds) == 2:
        described["comparison"] = [asdict(row) for row in compare(*rounds)]
    return msgspec.json.format(msgspec.json.encode(described)) + b"\n"
