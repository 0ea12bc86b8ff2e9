"""What `aioengine layout` knows about a launch before it exists. No torch: it answers at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.layout import LISTED_AXES, Axis, Nodes, ParallelLayout
from aioengine.model_config import ModelConfig

MAX_PIECES: Final = {"ranks": 4, "ranges": 3}
"""Of a list of ranks that is shown in full."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What every rank of one pipeline stage allocates; equal on all of them, padding included."""

    layers: range
    weight_bytes: int
    kv_token_bytes: int
    """KV cache of one token."""


@dataclass(frozen=True, slots=True)
class KVRoom:
    """What `--kv-cache-memory-bytes` holds, on the rank where it holds least."""

    num_bytes: int
    num_blocks: int
    """Without the null block."""
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model on a layout."""

    cfg: ModelConfig
    dtype: str
    max_model_len: int
    whole_bytes: int
    """Weights of a single rank that holds everything."""
    stages: tuple[StageFacts, ...]
    kv_room: KVRoom | None
    """None without `--kv-cache-memory-bytes`: the engine then looks at what is free."""

    def replica_bytes(self, layout: ParallelLayout) -> int:
        """Weights of all ranks of a replica."""
        per_stage = layout.pcp_size * layout.tp_size
        return per_stage * sum(stage.weight_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """All that the tables and sentences are made from."""

    config: EngineConfig
    layout: ParallelLayout
    nodes: Nodes | None
    model: ModelFacts | None

    @property
    def front_ends(self) -> range:
        everyone = self.config.api_ranks == "leaders"
        return self.layout.leaders if everyone else self.layout.leaders[:1]

    def roles(self, rank: int) -> list[str]:
        """What the rank is beside a peer; empty for a mere peer."""
        held = {
            "front end": rank in self.front_ends,
            "leader": rank in self.layout.leaders,
            "output": rank == self.layout.output_rank_of(rank),
        }
        return [role for role, is_held in held.items() if is_held]

    def crossing(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """The groups of an axis that are on more than one node; none when nodes are not known."""
        if self.nodes is not None:
            yield from filter(self.nodes.are_crossed, self.layout.groups(axis))

    def warnings(self) -> list[str]:
        """What a person should change before the launch."""
        found = []
        try:
            refuse_unsupported(self.config)
        except ValueError as error:
            found.append(f"a launch would be refused: {error}")
        crossing = list(self.crossing("tp"))
        if crossing and self.nodes is not None:
            first = crossing[0]
            nodes = shown_ranks(self.nodes.nodes_of(first))
            found.append(
                f"{len(crossing)} of {self.layout.num_groups('tp')} tp groups cross a node (ranks "
                f"{shown_ranks(first)} are on nodes {nodes}), and their two all-reduces per layer "
                "wait for the network; a --tensor-parallel-size that divides the "
                f"{self.nodes.ranks_per_node} ranks of a node avoids it"
            )
        return found

    def extra_json(self) -> dict[str, Any]:
        """Keys of `--json` beside those of the grid, for the flags that ask for more."""
        extra: dict[str, Any] = {}
        if self.nodes is not None:
            extra["nodes"] = self.nodes.num_nodes
            extra["ranks_per_node"] = self.nodes.ranks_per_node
            extra["crossing_groups"] = {
                axis: list(map(list, self.crossing(axis))) for axis in LISTED_AXES
            }
        if self.model is not None:
            extra["model"] = self._model_json(self.model)
        if extra:
            extra["warnings"] = self.warnings()
        return extra

    def _model_json(self, model: ModelFacts) -> dict[str, Any]:
        room = model.kv_room
        return {
            "name": model.cfg.name,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "weight_bytes_of_one_rank_alone": model.whole_bytes,
            "weight_bytes_per_replica": model.replica_bytes(self.layout),
            "stages": [
                {
                    "layers": [stage.layers.start, stage.layers.stop],
                    "weight_bytes_per_rank": stage.weight_bytes,
                    "kv_bytes_per_token_per_rank": stage.kv_token_bytes,
                }
                for stage in model.stages
            ],
            "kv_tokens": None if room is None else room.num_tokens,
        }


def shown_ranks(ranks: Sequence[int], *, full: bool = False) -> str:
    """Ascending ranks for people: "5", "0-3", "0,2", "0,8,…,56", "0-7,32-39,…,96-103".

    Neighbours join to a range; of many pieces the first two and the last are shown, unless `full`:
    those between follow from them in all groups of the grid.
    """
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in pieces]
    kind = "ranks" if len(pieces) == len(ranks) else "ranges"
    if len(shown) > MAX_PIECES[kind] and not full:
        shown[2:-1] = ["…"]
    return ",".join(shown)


def shown_bytes(num_bytes: int) -> str:
    """Binary units with four digits: "960 B", "1.406 KiB", "128.3 MiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{num_bytes / 1024**power:.4g} {units[power]}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
