"""An examination for people (tables) and for programs (one JSON object). No torch."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TextIO

import msgspec
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from aioengine.doctor.examination import Examination, Person
from aioengine.doctor.finding import Finding, ranks_text, spans
from aioengine.doctor.judge_links import kind_of, ms
from aioengine.doctor.messages import LARGE_BYTES, LATENCY_BYTES, Cell, Facts

PIPED_WIDTH: Final = 240
"""Columns where no terminal says how many there are: enough that no table is cut."""
MAX_ROWS: Final = 64
"""Ranks in the table of a larger launch: those that the findings name come first."""
MAX_GRID: Final = 16
"""Ranks up to which the round trips are shown one by one."""
STYLES: Final = {"fault": "bold red", "warning": "yellow"}


def as_json(found: Examination, findings: Sequence[Finding], exit_status: int) -> str:
    """One object: status (ok, warning, fault), exit_status, seconds, world_size, sizes, ranks
    (facts, device, clock, … of each rank that came), missing, again (more processes of a rank),
    strays, cut_off, unheard, interrupted, tcp (num_pairs_asked, is_sample, cells in µs), timings,
    unmeasured, findings (severity, kind, ranks, hosts, text). The types are in messages.py and
    examination.py."""
    described: dict[str, Any] = {
        "status": "fault" if exit_status else "warning" if findings else "ok",
        "exit_status": exit_status,
        "seconds": found.seconds,
        "world_size": found.world_size,
        "sizes": found.sizes,
        "ranks": [_described(person) for _, person in sorted(found.ranks.items())],
        "missing": found.missing,
        "again": [_described(person) for person in found.again],
        "strays": [_described(person) for person in found.strays],
        "cut_off": found.cut_off,
        "unheard": found.unheard,
        "interrupted": found.interrupted,
        "tcp": {
            "num_pairs_asked": found.num_pairs_asked,
            "is_sample": found.is_sample,
            "cells": found.cells,
        },
        "timings": found.timings,
        "unmeasured": found.unmeasured,
        "findings": findings,
    }
    return msgspec.json.encode(described).decode()


def _described(person: Person) -> dict[str, Any]:
    """Facts and results side by side in one flat object."""
    described: dict[str, Any] = msgspec.to_builtins(person)
    return {**described.pop("facts"), **described}


def print_report(found: Examination, findings: Sequence[Finding], file: TextIO) -> None:
    """Tables, then the findings as sentences."""
    width = None if file.isatty() else PIPED_WIDTH
    console = Console(file=file, width=width, markup=False, highlight=False, emoji=False)
    sizes = " × ".join(f"{axis} {size}" for axis, size in found.sizes.items() if size > 1)
    noun = "rank" if found.world_size == 1 else "ranks"
    console.print(f"aioengine doctor: {found.world_size} {noun}{f' = {sizes}' if sizes else ''}\n")
    people = _shown(found, findings)
    console.print(_rank_table(found, people), "")
    console.print(_host_table(people), "")
    if len(people) < len(found.ranks):
        console.print(f"{len(people)} of {len(found.ranks)} ranks are shown; --json has all\n")
    for line in _variable_lines(people):
        console.print(Text(line), soft_wrap=True)
    if found.cells:
        for part in _link_parts(found):
            console.print(part)
        console.print()
    if found.timings:
        console.print(_group_table(found), "")
    for line in found.unmeasured:
        console.print(Text(f"groups not measured, {line}"), soft_wrap=True)
    _print_findings(console, findings)
    console.print(_last_line(found, findings), soft_wrap=True)


def _shown(found: Examination, findings: Sequence[Finding]) -> list[Person]:
    """Those whom a finding names beside few others come first."""
    company = dict.fromkeys(found.ranks, found.world_size + 1)
    for finding in findings:
        for rank in finding.ranks:
            company[rank] = min(company.get(rank, len(finding.ranks)), len(finding.ranks))
    order = sorted(found.ranks, key=lambda rank: (company[rank], rank))
    return [found.ranks[rank] for rank in sorted(order[:MAX_ROWS])]


def _table(title: str, *columns: str) -> Table:
    """A column whose name begins with > holds numbers."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        justify: JustifyMethod = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, no_wrap=True)
    return table


# --- ranks and hosts -----------------------------------------------------------------------------


def _rank_table(found: Examination, people: list[Person]) -> Table:
    table = _table(
        "Ranks",
        ">rank",
        "place",
        "host",
        ">pid",
        "address",
        "device",
        ">free",
        ">matmul",
        ">clock",
        "launcher",
        "state",
    )
    for person in people:
        facts, device = person.facts, person.device
        on_device = device is not None and device.memory_total > 0
        free = device.memory_free if device is not None and on_device else facts.memory_free
        table.add_row(
            str(facts.rank),
            facts.coords,
            facts.host,
            str(facts.pid),
            f"{facts.address} ({facts.interface or 'no interface'})",
            device.name if device is not None else "?",
            _gib(free),
            f"{device.matmul_ms:.2f} ms" if device is not None and not device.error else "?",
            _clock(person),
            f"{facts.launcher} local {facts.local_rank} node {facts.node}",
            _state(person),
        )
    for rank in found.missing[:MAX_ROWS]:
        state = "unheard" if rank in found.unheard else "missing"
        table.add_row(str(rank), *([""] * 9), Text(state, style=STYLES["fault"]))
    for guest in found.cut_off:
        facts = guest.facts
        row = (str(facts.rank), facts.coords, facts.host, str(facts.pid), facts.address)
        table.add_row(*row, *([""] * 5), Text("cut off from rank 0", style=STYLES["fault"]))
    for person in (*found.again, *found.strays):
        facts = person.facts
        row = (str(facts.rank), facts.coords, facts.host, str(facts.pid), facts.address)
        state = "there already" if person in found.again else "of another launch"
        table.add_row(*row, *([""] * 5), Text(state, style=STYLES["fault"]))
    return table


def _state(person: Person) -> Text:
    for reason in ("left", "silent_in", "stuck_in", "failed"):
        if getattr(person, reason):
            return Text(reason.removesuffix("_in"), style=STYLES["fault"])
    return Text("here")


def _clock(person: Person) -> str:
    if person.facts.rank == 0:
        return "reference"
    clock = person.clock
    return "?" if clock is None else f"{clock.offset_ms:+.2f} ± {clock.error_ms:.2f} ms"


def _host_table(people: list[Person]) -> Table:
    """One row for each host and set of limits."""
    table = _table(
        "Hosts",
        "host",
        "ranks",
        "cores of a rank",
        ">of",
        ">threads",
        ">memory free",
        ">/dev/shm free",
        ">open files",
        ">locked memory",
        "InfiniBand",
    )
    rows: dict[tuple[str, ...], list[Facts]] = {}
    for person in people:
        facts, device = person.facts, person.device
        key = (
            facts.host,
            spans(facts.cores),
            str(facts.machine_cores),
            str(device.num_threads) if device is not None and not device.error else "?",
            str(facts.open_files),
            "no limit" if facts.locked_memory is None else _gib(facts.locked_memory),
            ", ".join(facts.infiniband) or "none",
        )
        rows.setdefault(key, []).append(facts)
    for (host, cores, of, threads, files, locked, infiniband), some in rows.items():
        shm = min(some, key=lambda facts: facts.shm_free)
        table.add_row(
            host,
            spans(sorted(facts.rank for facts in some)),
            cores,
            of,
            threads,
            f"{_gib(min(f.memory_free for f in some))} of {_gib(some[0].memory_total)}",
            shm.shm_error or f"{_gib(shm.shm_free)} of {_gib(shm.shm_total)}",
            files,
            locked,
            infiniband,
        )
    return table


def _variable_lines(people: list[Person]) -> Iterator[str]:
    """Variables that steer libraries, once for all ranks that have the same."""
    groups: dict[str, list[Facts]] = {}
    for person in people:
        variables = person.facts.variables
        text = " ".join(f"{name}={value}" for name, value in variables.items())
        groups.setdefault(text, []).append(person.facts)
    for text, some in groups.items():
        if text:
            yield f"variables of {ranks_text(facts.rank for facts in some)}: {text}"
    for person in people[:1]:
        yield f"launcher of rank {person.facts.rank}: {person.facts.launcher_variables or 'none'}"
    yield ""


def _gib(num_bytes: int) -> str:
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


# --- links and groups ----------------------------------------------------------------------------


def _link_parts(found: Examination) -> Iterator[Table | Text]:
    facts = {rank: person.facts for rank, person in found.ranks.items()}
    good = [cell for cell in found.cells if cell.round_trip_us is not None and not cell.failed]
    all_pairs = len(found.ranks) * (len(found.ranks) - 1)
    sample = f" (a sample of {all_pairs})" if found.is_sample else ""
    yield Text(
        f"TCP: {len(good)} of {found.num_pairs_asked} ways between ranks work{sample}", style="bold"
    )
    for kind in ("on one host", "between hosts"):
        times = [
            (cell.round_trip_us or 0.0, cell)
            for cell in good
            if kind_of(facts[cell.source], facts[cell.target]) == kind
        ]
        if times:
            slowest, cell = max(times, key=lambda timed: timed[0])
            yield Text(
                f"  {kind}: median {ms(statistics.median(us for us, _ in times))} there and back, "
                f"slowest rank {cell.source} to rank {cell.target} {ms(slowest)}"
            )
    ranks = sorted({cell.source for cell in found.cells} | {cell.target for cell in found.cells})
    if 2 < len(ranks) <= MAX_GRID:
        yield _grid(found.cells, ranks)


def _grid(cells: Iterable[Cell], ranks: list[int]) -> Table:
    table = _table("", "from", *(f">to {rank}" for rank in ranks))
    known = {(cell.source, cell.target): cell for cell in cells}
    for source in ranks:
        row = [_cell_text(known.get((source, target))) for target in ranks]
        table.add_row(f"rank {source}", *row)
    return table


def _cell_text(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    if cell.failed:
        text = cell.failed if cell.failed == "untried" else f"no {cell.failed}"
        return Text(text, style=STYLES["fault"])
    return Text(ms(cell.round_trip_us or 0.0))


def _group_table(found: Examination) -> Table:
    table = _table(
        "Groups",
        "group",
        "ranks",
        "operation",
        "backend",
        f">{LATENCY_BYTES // 2**10} KiB",
        f">{LARGE_BYTES // 2**20} MiB",
    )
    axes = list(dict.fromkeys(timing.group for timing in found.timings))
    timings = sorted(found.timings, key=lambda timing: (axes.index(timing.group), timing.ranks))
    for timing in timings[:MAX_ROWS]:
        table.add_row(
            timing.group.partition(":")[0],
            spans(timing.ranks),
            timing.operation,
            timing.backend,
            "-" if timing.latency_us is None else f"{timing.latency_us:.0f} µs",
            "-" if timing.gb_per_s is None else f"{timing.gb_per_s:.2f} GB/s",
        )
    return table


# --- findings ------------------------------------------------------------------------------------


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        console.print(
            Text(f"{finding.severity}: ", style=STYLES[finding.severity]).append(
                finding.text, style="default"
            ),
            soft_wrap=True,
        )


def _last_line(found: Examination, findings: Sequence[Finding]) -> Text:
    faults = sum(finding.severity == "fault" for finding in findings)
    warnings = len(findings) - faults
    if not findings:
        return Text(f"ok: nothing found in {found.seconds:.1f} s", style="green")
    counts = f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return Text(
        f"{counts} in {found.seconds:.1f} s", style=STYLES["fault" if faults else "warning"]
    )
