"""`aioengine layout` on a terminal: tables, and colour where the terminal has it.

Plain text, never cut, when the output is no terminal.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Final

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from aioengine.cli.layout_explain import Explanation
from aioengine.cli.layout_facts import LayoutFacts, ModelFacts, counted, shown_bytes, shown_ranks
from aioengine.layout import LISTED_AXES, Axis, ParallelLayout

MAX_ROWS: Final = 24
"""Stages that are listed, of all replicas together."""
MIN_REPLICAS: Final = 3
"""With many replicas: the first, a gap, the last; each lists its part of the rows at most."""
MAX_COLUMNS: Final = 8
"""tp ranks that get a column each."""
MAX_GROUPS: Final = 5
PIPE_COLUMNS: Final = 100_000
PROSE_COLUMNS: Final = 100

AXIS_NAMES: Final[dict[Axis, str]] = {"ep": "ep, eplb"}
MEANING: Final[dict[Axis, str]] = {
    "tp": "compute every layer together",
    "dcp": "share the KV cache of a tp group",
    "pcp": "share the tokens of a prompt",
    "pp": "hand hidden states on, stage to stage",
    "dp": "hold the same part of every replica",
    "ep": "share the experts of a mixture, if it is one",
}
LEGEND: Final = (
    "front end: serves HTTP · leader: schedules for its replica · output: samples tokens"
)
ROLE_STYLES: Final = {"front end": "bold green", "leader": "bold green", "output": "bold magenta"}
CROSSING_STYLE: Final = "yellow"


class Page:
    """The lines of an answer, as they go to stdout. `full` leaves nothing out of a large launch."""

    def __init__(self, facts: LayoutFacts, *, full: bool) -> None:
        self.lines: list[str] = []
        self._facts = facts
        self._layout = facts.layout
        self._full = full
        is_terminal = sys.stdout.isatty()
        self._console = _open_console(is_terminal)
        self._prose_columns = PROSE_COLUMNS if is_terminal else PIPE_COLUMNS

    def add_tables(self) -> None:
        self._add(Text(self._headline(), "bold"), "", self._grid(), "", Text(LEGEND, "dim"))
        if any(self._layout.group_size(axis) > 1 for axis in LISTED_AXES):
            self._add("", self._groups())
        if self._facts.model is not None:
            self._add_model(self._facts.model)
        self._add_warnings()
        self._add("", Text("--explain RANK says what one rank does, and with whom.", "dim"))

    def add_explanation(self, explanation: Explanation) -> None:
        self._add(Text(explanation.title, "bold"))
        for heading, notes in explanation.sections.items():
            table = Table.grid(padding=(0, 2), pad_edge=True)
            table.add_column(no_wrap=True, style="bold")
            table.add_column()
            for note in notes:
                table.add_row(note.about, note.text)
            self._add("", Text(heading, "bold cyan"))
            self._add_prose(table)
        self._add_warnings()

    def _add(self, *parts: RenderableType) -> None:
        for part in parts:
            self._render(part, self._console.width)

    def _add_prose(self, part: RenderableType) -> None:
        """Lines of a length that reads well, on a terminal; elsewhere a paragraph is a line."""
        self._render(part, min(self._console.width, self._prose_columns))

    def _render(self, part: RenderableType, width: int) -> None:
        """Without the spaces that fill up the last column."""
        with self._console.capture() as capture:
            self._console.print(part, width=width)
        self.lines += map(str.rstrip, capture.get().splitlines())

    def _add_warnings(self) -> None:
        for warning in self._facts.warnings():
            self._add("")
            self._add_prose(Text.assemble(("warning: ", "bold yellow"), warning))

    def _headline(self) -> str:
        layout, nodes = self._layout, self._facts.nodes
        sizes = {
            "external dp": layout.external_dp_size,
            "dp": layout.dp_size,
            "pp": layout.pp_size,
            "pcp": layout.pcp_size,
            "tp": layout.tp_size,
        }
        always = ("dp", "pp", "tp")
        product = " × ".join(
            f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in always
        )
        line = (
            f"{product} = {counted(layout.launch_world_size, 'process', 'processes')}: "
            f"{counted(layout.num_replicas, 'replica')} of {counted(layout.world_size, 'rank')}"
        )
        if nodes is None:
            return line
        is_full = nodes.num_nodes * nodes.ranks_per_node == layout.launch_world_size
        most = "" if is_full else "at most "
        return f"{line}, on {counted(nodes.num_nodes, 'node')} of {most}{nodes.ranks_per_node}"

    # --- the grid: a row per stage, a column per tp rank

    def _grid(self) -> Table:
        headers = list(self._cells(0))
        table = _table(*headers)
        table.add_column("role")
        rows_per_replica = self._layout.pp_size * self._layout.pcp_size
        for replica in self._picked(
            self._layout.num_replicas, max(MIN_REPLICAS, MAX_ROWS // rows_per_replica)
        ):
            for row in self._rows(replica, rows_per_replica):
                if isinstance(row, str):
                    table.add_row(*["…"] * len(headers), Text(row, "dim"))
                else:
                    table.add_row(*self._cells(row).values(), self._role(row))
            if rows_per_replica > 1:
                table.add_section()
        return table

    def _rows(self, replica: int | None, rows_per_replica: int) -> Iterator[int | str]:
        """The first rank of every row, or what is left out."""
        if replica is None:
            yield "more replicas"
            return
        most = MAX_ROWS if self._layout.num_replicas == 1 else MAX_ROWS // MIN_REPLICAS
        for row in self._picked(rows_per_replica, most):
            if row is None:
                yield "more stages"
            else:
                yield (replica * rows_per_replica + row) * self._layout.tp_size

    def _cells(self, first: int) -> dict[str, str | Text]:
        """By header, for the tp group whose first rank is `first`."""
        layout, facts = self._layout, self._facts
        place, ranks = layout.coords(first), layout.group("tp", first)
        cells: dict[str, str | Text] = {}
        if layout.external_dp_size > 1:
            cells["external dp"] = str(place.external_dp)
        cells |= {"dp": str(place.dp), "pp": str(place.pp)}
        if layout.pcp_size > 1:
            cells["pcp"] = str(place.pcp)
        if len(ranks) > MAX_COLUMNS:
            cells[f"tp0-{len(ranks) - 1}"] = shown_ranks(ranks)
        else:
            cells |= {f"tp{i}": str(rank) for i, rank in enumerate(ranks)}
            cells["tp0"] = Text(str(first), self._role(first).style)
        if facts.nodes is not None:
            nodes = facts.nodes.nodes_of(ranks)
            cells["node"] = Text(shown_ranks(nodes), CROSSING_STYLE if len(nodes) > 1 else "")
        if facts.model is not None:
            cells["layers"] = shown_ranks(facts.model.stages[place.pp].layers)
        return cells

    def _role(self, first: int) -> Text:
        """Of the first rank of a tp group; the others are mere peers."""
        roles = self._facts.roles(first)
        return Text(f"{first}: {', '.join(roles)}", ROLE_STYLES[roles[0]]) if roles else Text()

    def _picked(self, count: int, limit: int) -> Iterator[int | None]:
        """0 … count - 1; of more than `limit` the first ones, None for a gap, and the last."""
        if count <= limit or self._full:
            yield from range(count)
        else:
            yield from range(limit - 2)
            yield None
            yield count - 1

    # --- groups

    def _groups(self) -> Table:
        """A group of one builds nothing, so only axes with larger groups are shown."""
        table = _table()
        table.add_column("axis", style="bold", no_wrap=True)
        table.add_column("groups", justify="right", no_wrap=True)
        table.add_column("whose ranks")
        which = "which"
        if self._facts.nodes is not None:
            table.add_column("crossing", justify="right")
            which = "which (* crosses nodes)"
        table.add_column(which, overflow="fold")
        for axis in LISTED_AXES:
            size, num = self._layout.group_size(axis), self._layout.num_groups(axis)
            if size == 1:
                continue
            row: list[str | Text] = [AXIS_NAMES.get(axis, axis), f"{num} of {size}", MEANING[axis]]
            if self._facts.nodes is not None:
                num_crossing = sum(1 for _ in self._facts.crossing(axis))
                row.append(Text(str(num_crossing), CROSSING_STYLE if num_crossing else ""))
            table.add_row(*row, self._listed_groups(axis))
        return table

    def _listed_groups(self, axis: Axis) -> Text:
        layout = self._layout
        groups = layout.groups(axis)
        if layout.num_groups(axis) <= MAX_GROUPS or self._full:
            return Text("  ").join(map(self._shown_group, groups))
        first = map(self._shown_group, islice(groups, MAX_GROUPS - 2))
        last = self._shown_group(layout.group(axis, layout.launch_world_size - 1))
        return Text("  ").join([*first, Text("…"), last])

    def _shown_group(self, ranks: tuple[int, ...]) -> Text:
        nodes = self._facts.nodes
        crosses = nodes is not None and nodes.are_crossed(ranks)
        shown = shown_ranks(ranks, full=self._full)
        return Text(f"{shown}*", CROSSING_STYLE) if crosses else Text(shown)

    # --- bytes

    def _add_model(self, model: ModelFacts) -> None:
        cfg, layout = model.cfg, self._layout
        self._add(
            "",
            Text(f"{cfg.name} in {model.dtype}", "bold"),
            f"{cfg.num_layers} layers of {cfg.num_heads} query and {cfg.num_kv_heads} key/value "
            f"heads of {cfg.head_dim}, vocabulary {cfg.vocab_size}; bytes on each rank:",
            "",
            _stage_table(model),
            "",
        )
        for sentence in _total_sentences(model, layout):
            self._add_prose(sentence)


def _stage_table(model: ModelFacts) -> Table:
    request = f"of {model.max_model_len} tokens"
    table = _table("stage", "layers", "weights", "KV cache of a token", request)
    table.add_column("beside the layers")
    last = len(model.stages) - 1
    for number, stage in enumerate(model.stages):
        parts = ["embedding"] if number == 0 else []
        parts += ["norm", "vocabulary head"] if number == last else []
        table.add_row(
            str(number),
            shown_ranks(stage.layers),
            shown_bytes(stage.weight_bytes),
            shown_bytes(stage.kv_token_bytes),
            shown_bytes(model.max_model_len * stage.kv_token_bytes),
            ", ".join(parts),
        )
    return table


def _total_sentences(model: ModelFacts, layout: ParallelLayout) -> Iterator[str]:
    held, whole = model.replica_bytes(layout), model.whole_bytes
    if layout.world_size > 1:
        more = f"{held / whole - 1:.1%} more than" if held > whole else "as much as"
        yield (
            f"The {layout.world_size} ranks of a replica hold {shown_bytes(held)} of weights, "
            f"{more} the {shown_bytes(whole)} of a rank alone (padding, and what several need)."
        )
    if layout.num_replicas > 1:
        total = shown_bytes(held * layout.num_replicas)
        yield f"The {layout.num_replicas} replicas of the launch hold {total} of weights."
    room = model.kv_room
    if room is None:
        yield "--kv-cache-memory-bytes N tells how many tokens fit N bytes of every rank."
        return
    num_requests = room.num_tokens / model.max_model_len
    many = f"{num_requests:.1f} requests of {model.max_model_len}"
    yield (
        f"With {shown_bytes(room.num_bytes)} of KV cache on every rank a replica keeps "
        f"{room.num_tokens} tokens ({counted(room.num_blocks, 'block')} of {room.block_size}): "
        f"{many if num_requests >= 1 else 'the longest request is cut to that'}."
    )


def _open_console(is_terminal: bool) -> Console:
    """On stdout, with rich's own rules for colour: none with NO_COLOR or without a terminal."""
    console = Console(markup=False, highlight=False)
    if console.no_color:
        console = Console(markup=False, highlight=False, color_system=None)  # no bold either
    if not is_terminal:
        console.width = PIPE_COLUMNS
    return console


def _table(*numbers: str) -> Table:
    """With a right-aligned column under each of these headers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table
