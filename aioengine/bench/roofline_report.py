"""A roofline for people (tables and sentences) and for programs (one JSON object)."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from aioengine.bench.roofline_machine import Machine
from aioengine.bench.roofline_work import Share

PIPED_WIDTH: Final = 160
"""Columns where no terminal says how many there are."""


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    dtype: str
    num_threads: int
    weight_bytes: int
    """That every step reads."""
    machine: Machine
    shares: tuple[Share, ...]


def print_report(report: Report) -> None:
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    console.print(
        f"{report.model}, {report.dtype}: a step reads {report.weight_bytes / 1e6:,.1f} MB of "
        f"weights; compute threads: {report.num_threads}\n",
        soft_wrap=True,
    )
    table = _table(["memory read again and again", "threads", "GB/s"])
    for found in report.machine.bandwidths:
        size = f"{found.num_bytes / 1e6:,.1f} MB"
        table.add_row(size, str(found.num_threads), f"{found.bytes_per_s / 1e9:,.1f}")
    console.print(table, "")
    table = _table(["products of the model's shapes", "rows", "GFLOP/s", "weights, GB/s"])
    for rate in report.machine.matmuls:
        figures = (f"{rate.flops_per_s / 1e9:,.0f}", f"{rate.weight_bytes_per_s / 1e9:,.1f}")
        table.add_row(rate.dtype, f"{rate.rows:,}", *figures)
    console.print(table, "")
    table = _table(["engine", "ms", "GB", "GFLOP", "of memory", "of matmul", "tokens/s", "limit"])
    for share in report.shares:
        table.add_row(
            share.name,
            f"{share.seconds * 1e3:,.2f}",
            f"{share.num_bytes / 1e9:,.3f}",
            f"{share.num_flops / 1e9:,.2f}",
            f"{share.of_memory:.0%}",
            f"{share.of_matmul:.0%}",
            f"{share.tokens_per_s:,.1f}",
            f"{share.limit_tokens_per_s:,.1f}",
        )
    console.print(table, "")
    console.print(", ".join(sentence(share) for share in report.shares), soft_wrap=True)


def sentence(share: Share) -> str:
    reached = share.of_memory if share.limit == "memory" else share.of_matmul
    what = "memory speed" if share.limit == "memory" else "matmul rate"
    return f"{share.name.replace(',', ' of', 1)} at {reached:.0%} of {what}"


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def to_json(report: Report) -> str:
    """Model, threads, machine (bandwidths, matmuls), shares: seconds, bytes and operations per
    second; shares are of 1."""
    described = asdict(report)
    described["shares"] = [asdict(share) | {"limit": share.limit} for share in report.shares]
    return msgspec.json.encode(described).decode()
