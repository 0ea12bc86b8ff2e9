"""What `aioengine bench steps` found, as tables or JSON."""

import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from aioengine.timeline.breakdown import DEVICE_ROWS, LOOP_ROWS, WAITING, Breakdown

PIPED_WIDTH: Final = 400
"""For output that is no terminal: nothing is cut."""
GROWTH_ROWS: Final = (
    *("build batch", "attention", "linear", "elementwise, norms", "all-reduce"),
    *("logits", "sample", WAITING),
)
"""Of the leader's device thread, in the tables of growth."""


class RankShare(msgspec.Struct, frozen=True):
    rank: int
    coords: str
    breakdown: Breakdown


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in which `num_streams` requests decode; with pipeline stages each takes its part of
    them."""

    num_streams: int
    input_len: int
    output_len: int
    num_microbatches: int
    replica: int
    step_ms: float
    """Median, while nothing is recorded; 0 when no two adjacent steps had all streams."""
    recorded_step_ms: float
    cost: float
    """Of recording, as a share of the step: the median over pairs of rounds."""
    cpu_cost: float
    """The same for the CPU time of the device threads, which neighbours disturb less."""
    ranks: list[RankShare]

    @property
    def tokens_per_s(self) -> float:
        return (
            self.num_streams / self.num_microbatches / self.step_ms * 1e3 if self.step_ms else 0.0
        )

    @property
    def leader(self) -> Breakdown:
        return self.ranks[0].breakdown


def print_json(measured: Sequence[Measured]) -> None:
    """One line, also with several replicas."""
    shapes = [
        {
            **msgspec.to_builtins(each),
            "tokens_per_s": each.tokens_per_s,
        }
        for each in measured
    ]
    print(msgspec.json.encode({"replica": measured[0].replica, "shapes": shapes}).decode())


def print_tables(measured: Sequence[Measured]) -> None:
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:  # replicas print at the same time
        for each in measured:
            _print_shape(console, each)
        first = measured[0]
        by_streams = [each for each in measured if each.input_len == first.input_len]
        by_length = [each for each in measured if each.num_streams == first.num_streams]
        if len(by_streams) > 1:
            console.print(f"growth with running requests, prompts of {first.input_len:,} tokens")
            console.print(growth_table("requests", by_streams), "")
        if len(by_length) > 1:
            console.print(f"growth with context, {_streams(first.num_streams)}")
            console.print(growth_table("context", by_length), "")
    sys.stdout.write(captured.get())
    sys.stdout.flush()


def _print_shape(console: Console, each: Measured) -> None:
    replica = f"replica {each.replica}: " if each.replica else ""
    what = f"{replica}{_streams(each.num_streams)} of {each.input_len:,} + {each.output_len} tokens"
    if each.leader.is_empty or not each.step_ms:
        console.print(
            f"{what}: no two steps had all of them: the KV cache is too small for them, or "
            "--output-len too short\n",
            soft_wrap=True,
        )
        return
    console.print(
        f"{what}: {each.step_ms:,.2f} ms a step, {each.tokens_per_s:,.1f} tokens/s; with the "
        f"recording {each.recorded_step_ms:,.2f} ms ({each.cost:+.1%}; CPU time of device threads "
        f"{each.cpu_cost:+.1%})",
        soft_wrap=True,
    )
    console.print(
        breakdown_table(
            {f"rank {rank.rank} ({rank.coords})": rank.breakdown for rank in each.ranks}
        ),
        "",
    )


def _streams(number: int) -> str:
    return f"{number:,} stream{'' if number == 1 else 's'}"


def breakdown_table(ranks: Mapping[str, Breakdown]) -> Table:
    """A column per rank: milliseconds of a step on average, and their share of its period."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("ms a step, on average")
    for name in ranks:
        table.add_column(name, justify="right")
        table.add_column("%", justify="right")
    columns = list(ranks.values())

    def add(title: str, values: Sequence[float]) -> None:
        cells = []
        for value, column in zip(values, columns, strict=True):
            share = value / column.period_ms if column.period_ms else 0.0
            cells += [f"{value:,.3f}", f"{share:.1%}"] if value else ["", ""]
        table.add_row(title, *cells)

    for row in DEVICE_ROWS:
        if any(row in column.device for column in columns):
            add(row, [column.device.get(row, 0.0) for column in columns])
    add("= a step", [column.period_ms for column in columns])
    table.add_section()
    for loop_row in LOOP_ROWS:
        if any(loop_row in column.loop for column in columns):
            add(f"loop: {loop_row}", [column.loop.get(loop_row, 0.0) for column in columns])
    return table


def growth_table(name: str, measured: Sequence[Measured]) -> Table:
    """Milliseconds of a step on the leader, a row per shape."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    loop = ("plan", "apply result")
    for title in (name, "ms a step", "tokens/s", *GROWTH_ROWS, *(f"loop: {row}" for row in loop)):
        table.add_column(title, justify="right")
    for each in measured:
        size = each.num_streams if name == "requests" else each.input_len
        if each.leader.is_empty:
            table.add_row(f"{size:,}", "-")
            continue
        table.add_row(
            f"{size:,}",
            f"{each.step_ms:,.2f}",
            f"{each.tokens_per_s:,.1f}",
            *(f"{each.leader.device.get(row, 0.0):,.2f}" for row in GROWTH_ROWS),
            *(f"{each.leader.loop.get(row, 0.0):,.3f}" for row in loop),
        )
    return table
