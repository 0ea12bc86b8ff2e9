"""Print where every rank of a launch would stand, and its groups, without launching anything."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from aioengine.layout import AXES, SIZE_FLAGS, Axis, ParallelLayout

ALIASES: Final = {
    "tp_size": ("-tp",),
    "pp_size": ("-pp",),
    "dp_size": ("-dp",),
    "pcp_size": ("-pcp",),
    "dcp_size": ("-dcp",),
    "external_dp_size": (),
}
HELP: Final = {
    "tp_size": "ranks that share every layer",
    "pp_size": "stages that the layers are cut into",
    "dp_size": "replicas",
    "pcp_size": "ranks that share a prompt",
    "dcp_size": "ranks of a tp group that share its KV cache",
    "external_dp_size": "launches side by side",
}
MEANING: Final[dict[Axis, str]] = {
    "tp": "share every layer",
    "dcp": "share the KV cache of a tp group",
    "pcp": "share the prompt",
    "pp": "stages, first to last",
    "dp": "same place in every replica",
    "ep": "experts (mixture of experts only)",
}


def configure(parser: argparse.ArgumentParser) -> None:
    for dest, aliases in ALIASES.items():
        parser.add_argument(
            SIZE_FLAGS[dest], *aliases, dest=dest, type=int, metavar="N", default=1, help=HELP[dest]
        )
    parser.add_argument(
        "--json", action="store_true", default=False, help="one JSON object instead of a table"
    )


def run(args: argparse.Namespace) -> int:
    try:
        layout = ParallelLayout(**{dest: getattr(args, dest) for dest in SIZE_FLAGS})
    except ValueError as error:
        print(f"aioengine layout: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(layout.table()) if args.json else "\n".join(describe(layout)))
    return 0


def describe(layout: ParallelLayout) -> Iterator[str]:
    """The lines of the table that a person reads before a launch."""
    used = _sizes(layout)
    yield (
        f"{' × '.join(f'{axis} {size}' for axis, size in used.items())} = "
        f"{layout.launch_world_size} process{'es' if layout.launch_world_size > 1 else ''}"
    )
    yield ""
    yield from _columns(_rank_rows(layout, list(used)))
    groups = list(_group_rows(layout))
    if groups:
        yield ""
        yield from _columns([("group", "its ranks", ""), *groups])


def _sizes(layout: ParallelLayout) -> dict[str, int]:
    """Slowest axis first; the two that few launches use appear when they are used."""
    sizes = {
        "external_dp": layout.external_dp_size,
        "dp": layout.dp_size,
        "pp": layout.pp_size,
        "pcp": layout.pcp_size,
        "tp": layout.tp_size,
    }
    return {axis: size for axis, size in sizes.items() if size > 1 or axis in ("dp", "pp", "tp")}


def _rank_rows(layout: ParallelLayout, axes: list[str]) -> Iterator[tuple[str, ...]]:
    yield ("rank", *axes, "role")
    for rank in range(layout.launch_world_size):
        coords = layout.coords(rank)
        yield (str(rank), *(str(getattr(coords, axis)) for axis in axes), _roles(layout, rank))


def _roles(layout: ParallelLayout, rank: int) -> str:
    in_replica = rank - layout.leader_of(rank)
    roles = {
        "front end": rank == 0,
        "leader": in_replica == 0,
        "output": in_replica == layout.output_rank_in_replica,
    }
    return ", ".join(role for role, held in roles.items() if held)


def _group_rows(layout: ParallelLayout) -> Iterator[tuple[str, str, str]]:
    """A group of one builds nothing, so only axes with larger groups are shown."""
    for axis in AXES:
        if len(layout.group(axis, 0)) > 1:
            groups = " ".join(f"[{' '.join(map(str, group))}]" for group in layout.groups(axis))
            yield (axis, MEANING[axis], groups)


def _columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
