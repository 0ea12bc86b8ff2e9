"""Time a collective between ranks: the backend that the engine would use, and the library's own.

Starts its ranks itself, or is one when torchrun (or another launcher) started it. What is timed is
the custom op that models call, with everything behind it. Backends take turns, and figures are
medians over calls of rank 0, so that a busy neighbour meets all of them.
"""

import argparse
import functools
import json
import logging
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from aioengine.cli.local_ranks import end_with_parent, run_ranks
from aioengine.dist import ops
from aioengine.dist.groups import GroupCoordinator
from aioengine.dist.launcher import choose_interface, own_address, read_environment
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.dist.rendezvous import open_launcher_store
from aioengine.dist.worlds import (
    GroupBuilder,
    GroupOptions,
    ReplicaStore,
    ServedStore,
    connect_store,
    open_world_groups,
)
from aioengine.errors import EngineError
from aioengine.flags import CommandParser
from aioengine.layout import ParallelLayout

PROG: Final = "aioengine bench collectives"
OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter")
DTYPES: Final = ("float32", "bfloat16", "float16", "int32", "int64")
UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DEFAULT_SIZES: Final = "1K,4K,16K,64K,256K,1M,4M"
DEFAULT_DTYPES: Final = "float32,bfloat16"
MAX_BYTES: Final = 1 << 30
TIMEOUT_S: Final = 30
"""Of one operation, and for ranks to meet."""
NUM_TURNS: Final = 5
BYTES_PER_TURN: Final = 64 << 20
MIN_CALLS, MAX_CALLS = 16, 400
"""Of one backend in one turn. The first quarter does not count: after a turn of another backend it
takes a while until every rank runs on a core of its own again."""
SHUTDOWN_TIMEOUT_S: Final = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, checked."""

    operation: str
    num_bytes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in µs, by backend; the engine's first choice comes first."""

    num_bytes: int
    dtype: str
    medians_us: dict[str, float]

    @property
    def ratio(self) -> float:
        """How many times longer the last backend takes than the first; 1 where it is the same."""
        medians = list(self.medians_us.values())
        return medians[-1] / medians[0]


def configure(parser: CommandParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to start on this machine [2]")
    parser.add_argument(
        "--operation", choices=OPERATIONS, default="all_reduce", help="what to time [all_reduce]"
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE,...",
        default=DEFAULT_SIZES,
        help=f"bytes that each rank puts in, K and M are binary [{DEFAULT_SIZES}]",
    )
    parser.add_argument(
        "--dtypes",
        metavar="TYPE,...",
        default=DEFAULT_DTYPES,
        help=f"some of {', '.join(DTYPES)} [{DEFAULT_DTYPES}]",
    )
    parser.add_argument(
        "--json", action="store_true", default=False, help="one JSON object instead of a table"
    )


def run(args: argparse.Namespace) -> int:
    try:
        plan = Plan(args.operation, _sizes(args.sizes), _dtypes(args.dtypes))
        env = read_environment(os.environ)
        num_ranks = _num_ranks(vars(args).get("ranks"), env)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    if env.kind == "none":
        return run_ranks(PROG, _rank_argv(args), num_ranks, SHUTDOWN_TIMEOUT_S)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches ranks, too: no traceback of each
    end_with_parent()
    try:
        rows = measure(plan, env)
    except EngineError as error:
        print(f"{PROG}: error: rank {env.rank}: {error}", file=sys.stderr)
        return 1
    if env.rank == 0:
        show = print_json if args.json else print_table
        show(plan, num_ranks, rows)
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)([KMG]?)(?:i?B)?", part.strip())
        if match is None or int(match[1]) * UNITS[match[2]] % 8:
            raise ValueError(
                f"--sizes takes multiples of 8 such as 4096, 16K or 1M, found {part!r}"
            )
        sizes.append(int(match[1]) * UNITS[match[2]])
        if sizes[-1] > MAX_BYTES:
            raise ValueError(f"--sizes takes at most 1G, found {part!r}")
    return tuple(sizes)


def _dtypes(text: str) -> tuple[torch.dtype, ...]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in DTYPES]:
        raise ValueError(f"--dtypes takes {', '.join(DTYPES)}, found {unknown[0]!r}")
    return tuple(getattr(torch, name) for name in names)


def _num_ranks(given: int | None, env: LauncherEnv) -> int:
    if env.kind == "none":
        num_ranks = 2 if given is None else given
        if num_ranks < 2:
            raise ValueError(f"--ranks must be 2 or more, found {num_ranks}")
        return num_ranks
    if given not in (None, env.world_size):
        raise ValueError(f"--ranks is {given}, but {env.kind} started {env.world_size}")
    if env.world_size < 2:
        raise ValueError(f"{env.kind} started one rank, and a collective takes two or more")
    return env.world_size


def _rank_argv(args: argparse.Namespace) -> list[str]:
    argv = [sys.executable, "-m", "aioengine.cli", "bench", "collectives"]
    argv += [f"--{name}={getattr(args, name)}" for name in ("operation", "sizes", "dtypes")]
    return [*argv, "--json"] if args.json else argv


# --- on every rank -------------------------------------------------------------------------------


def measure(plan: Plan, env: LauncherEnv) -> list[Row]:
    """Every rank of the launch calls it; the figures are this rank's."""
    address = own_address(env, None)
    choose_interface(address)
    options = GroupOptions(
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
        node=env.node,
        num_local_ranks=env.local_world_size,
    )
    layout = ParallelLayout(tp_size=env.world_size)
    store = _open_world_store(env, address)
    groups = open_world_groups(layout, env.rank, store, options, is_mixture=False)
    everyone = range(env.world_size)
    library = GroupBuilder(everyone, env.rank, replace(options, custom_all_reduce=False)).build(
        "library", [tuple(everyone)]
    )
    assert library is not None
    library.exercise([])
    with torch.inference_mode():
        rows = list(_measure_rows(plan, [groups.tp, library]))
    library.close()
    groups.close()
    return rows


def _open_world_store(env: LauncherEnv, address: str) -> ReplicaStore:
    """Served by rank 0, which the others find through the launcher's store."""
    launch = open_launcher_store(env, TIMEOUT_S)
    if env.rank == 0:
        store = ServedStore(address)
        launch.set("bench", f"{address} {store.port}")
        return store
    host, _, port = launch.get("bench").decode().partition(" ")
    return connect_store(host, int(port), TIMEOUT_S)


def _measure_rows(plan: Plan, groups: Sequence[GroupCoordinator]) -> Iterator[Row]:
    for dtype in plan.dtypes:
        for num_bytes in plan.num_bytes:
            num_ranks = groups[0].world_size  # divides what reduce_scatter gets, rounded up
            x = torch.ones(-(-num_bytes // dtype.itemsize // num_ranks) * num_ranks, dtype=dtype)
            calls = {
                group.communicator.names[0]: _call(plan.operation, x, group) for group in groups
            }
            num_calls = max(MIN_CALLS, min(MAX_CALLS, BYTES_PER_TURN // num_bytes))
            times_us: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(NUM_TURNS):
                for name, call in calls.items():
                    taken_us = [_time_us(call) for _ in range(num_calls)]
                    times_us[name] += taken_us[num_calls // 4 :]
            medians = {name: statistics.median(times) for name, times in times_us.items()}
            yield Row(num_bytes, str(dtype).removeprefix("torch."), medians)


def _call(operation: str, x: Tensor, group: GroupCoordinator) -> Callable[[], Tensor]:
    """The custom op on x, ready to be called."""
    match operation:
        case "all_reduce":
            return functools.partial(ops.all_reduce, x, group.name)
        case "all_gather":
            return functools.partial(ops.all_gather, x, 0, group.name)
        case _:
            return functools.partial(ops.reduce_scatter, x, 0, group.name)


def _time_us(call: Callable[[], Tensor]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1000


# --- what a person, or a program, gets to see ----------------------------------------------------


def print_table(plan: Plan, num_ranks: int, rows: Sequence[Row]) -> None:
    first, *others = rows[0].medians_us
    table = Table()
    table.add_column("size", justify="right")
    table.add_column("type")
    for name in (first, *others):
        table.add_column(name, justify="right")
    if others:
        table.add_column(f"{others[-1]} / {first}", justify="right")
    for row in rows:
        figures = [f"{median:,.1f}" for median in row.medians_us.values()]
        ratio = [f"{row.ratio:.1f}"] if others else []
        table.add_row(_size_text(row.num_bytes), row.dtype, *figures, *ratio)
    console = Console()
    console.print(f"{plan.operation}, {num_ranks} ranks, medians in µs")
    console.print(table)


def print_json(plan: Plan, num_ranks: int, rows: Sequence[Row]) -> None:
    shown = [asdict(row) | {"ratio": row.ratio} for row in rows]
    print(json.dumps({"operation": plan.operation, "num_ranks": num_ranks, "rows": shown}))


def _size_text(num_bytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes % UNITS[unit[0]] == 0:
            return f"{num_bytes // UNITS[unit[0]]} {unit}"
    return f"{num_bytes} B"
