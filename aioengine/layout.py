"""The rank grid: pure arithmetic over ints.

Ranks count through a grid, like the digits of a number, slowest first:

    ExternalDP × DP × PP × PCP × TP

    tp   ranks that share every layer: neighbours, because they exchange the most
    pcp  ranks that share a prompt
    pp   stages: each has some of the layers
    dp   replicas: each is a whole copy of the model, of tp × pcp × pp ranks
    external dp  launches side by side; in a trainer's world, what that leaves over

Two axes do not add ranks. DCP cuts a tp group into runs of `dcp_size`, which share its KV cache.
EP is for mixtures of experts: all ranks that hold one stage, in every replica of a launch, share
its experts. EPLB has the same ranks and a communicator of its own, so that moving experts about
never queues between the exchanges of a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Axis = Literal["tp", "dcp", "pcp", "pp", "dp", "ep", "eplb"]
AXES: Final[tuple[Axis, ...]] = ("tp", "dcp", "pcp", "pp", "dp", "ep", "eplb")
LISTED_AXES: Final = AXES[:-1]
"""Those that `ParallelLayout.table` lists; eplb would repeat ep."""

SIZE_FLAGS: Final = {
    "external_dp_size": "--external-data-parallel-size",
    "dp_size": "--data-parallel-size",
    "pp_size": "--pipeline-parallel-size",
    "pcp_size": "--prefill-context-parallel-size",
    "tp_size": "--tensor-parallel-size",
    "dcp_size": "--decode-context-parallel-size",
}
"""The flag behind each size, for error texts."""


@dataclass(frozen=True, slots=True)
class Coords:
    """Where one rank stands on every axis."""

    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int

    def __str__(self) -> str:
        external_dp = f"xdp{self.external_dp} " if self.external_dp else ""
        pcp = f" pcp{self.pcp}" if self.pcp else ""
        return f"{external_dp}dp{self.dp} pp{self.pp}{pcp} tp{self.tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of all axes. Coordinates cost O(1), a rank's group O(group size)."""

    external_dp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    tp_size: int = 1
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"{SIZE_FLAGS[name]} must be at least 1, got {size}")
        if self.tp_size % self.dcp_size:
            raise ValueError(
                f"--decode-context-parallel-size {self.dcp_size} must divide "
                f"--tensor-parallel-size {self.tp_size}"
            )

    @classmethod
    def fit(
        cls,
        num_processes: int,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        pcp_size: int = 1,
        dcp_size: int = 1,
        dp_size: int | Literal["auto"] = "auto",
        external_dp_size: int | Literal["auto"] = 1,
    ) -> "ParallelLayout":
        """The layout for `num_processes` launched processes; one axis may be "auto".

        In a trainer's world `external_dp_size` is "auto": what the trainer's world leaves over.
        Raises ValueError that shows the product and what was launched when they do not agree.
        """
        per_replica = tp_size * pp_size * pcp_size
        shown = f"tp {tp_size} × pp {pp_size}" + (f" × pcp {pcp_size}" if pcp_size > 1 else "")
        if dp_size == "auto" and external_dp_size == "auto":
            raise ValueError(
                "--data-parallel-size and --external-data-parallel-size cannot both be auto"
            )
        if dp_size == "auto" or external_dp_size == "auto":
            fixed = external_dp_size if dp_size == "auto" else dp_size
            assert isinstance(fixed, int)
            left_over, rest = divmod(num_processes, per_replica * fixed)
            if rest or not left_over:
                axis = "external dp" if dp_size == "auto" else "dp"
                fixed_shown = f" × {axis} {fixed}" if fixed > 1 else ""
                raise ValueError(
                    f"{shown}{fixed_shown} = {per_replica * fixed} processes does not divide the "
                    f"{num_processes} that were launched"
                )
            dp_size, external_dp_size = (
                (left_over, fixed) if dp_size == "auto" else (fixed, left_over)
            )
        assert isinstance(external_dp_size, int)
        wanted = per_replica * dp_size * external_dp_size
        if wanted != num_processes:
            outer = f" × external dp {external_dp_size}" if external_dp_size > 1 else ""
            raise ValueError(
                f"{shown} × dp {dp_size}{outer} = {wanted} processes, but {num_processes} were "
                "launched"
            )
        return cls(
            external_dp_size=external_dp_size,
            dp_size=dp_size,
            pp_size=pp_size,
            pcp_size=pcp_size,
            tp_size=tp_size,
            dcp_size=dcp_size,
        )

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tp_size * self.pp_size * self.pcp_size

    @property
    def world_size_across_dp(self) -> int:
        return self.world_size * self.dp_size

    @property
    def launch_world_size(self) -> int:
        """Processes the launcher started."""
        return self.world_size_across_dp * self.external_dp_size

    @property
    def num_replicas(self) -> int:
        return self.dp_size * self.external_dp_size

    @property
    def output_rank_in_replica(self) -> int:
        """First tp rank of the last stage: it samples."""
        return self.world_size - self.tp_size * self.pcp_size

    @property
    def leaders(self) -> range:
        """The rank with pp = pcp = tp = 0 of every replica."""
        return range(0, self.launch_world_size, self.world_size)

    def coords(self, rank: int) -> Coords:
        rest, tp = divmod(rank, self.tp_size)
        rest, pcp = divmod(rest, self.pcp_size)
        rest, pp = divmod(rest, self.pp_size)
        external_dp, dp = divmod(rest, self.dp_size)
        return Coords(external_dp, dp, pp, pcp, tp)

    def rank(self, coords: Coords) -> int:
        rank = coords.external_dp * self.dp_size + coords.dp
        rank = rank * self.pp_size + coords.pp
        rank = rank * self.pcp_size + coords.pcp
        return rank * self.tp_size + coords.tp

    def leader_of(self, rank: int) -> int:
        return rank - rank % self.world_size

    def output_rank_of(self, rank: int) -> int:
        """The rank that samples in `rank`'s replica."""
        return self.leader_of(rank) + self.output_rank_in_replica

    def replica(self, rank: int) -> range:
        """All ranks of the replica that holds `rank`."""
        leader = self.leader_of(rank)
        return range(leader, leader + self.world_size)

    def world_of(self, rank: int, *, one_world: bool) -> range:
        """The ranks of torch.distributed's default group, as `rank` knows it.

        One world is the whole launch. It is needed for mixtures of experts, whose ep groups join
        replicas, and met where a trainer has made the default group. Otherwise the world is the
        replica, so that the end of one leaves the others alone.
        """
        return range(self.launch_world_size) if one_world else self.replica(rank)

    def feedback_ranks(self, rank: int) -> tuple[int, ...]:
        """Between whom sampled ids travel in `rank`'s replica: its output rank and the first stage,
        which embeds them; ascending."""
        first_stage = self.replica(rank)[: self.pcp_size * self.tp_size]
        return tuple(sorted({*first_stage, self.output_rank_of(rank)}))

    def expert_ranks(self, rank: int, *, is_mixture: bool) -> tuple[int, ...]:
        """The ranks that share `rank`'s experts: those of its ep group, and of its eplb group.

        `group("ep", rank)` is the place in the grid, whatever the model. ValueError for a dense
        model: a communicator asked for there is a mistake.
        """
        if not is_mixture:
            raise ValueError(
                "a dense model has no experts, so it has no expert-parallel (ep, eplb) group: its "
                "replicas share nothing at run time"
            )
        return self.group("ep", rank)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group on one axis, ascending."""
        size, stride, block = self._pattern(axis)
        first = rank - rank % block - rank // stride % size * stride
        return _members(first, size, stride, block)

    def group_size(self, axis: Axis) -> int:
        size, _, block = self._pattern(axis)
        return size * block

    def num_groups(self, axis: Axis) -> int:
        return self.launch_world_size // self.group_size(axis)

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """All groups of an axis, each once, by their first ranks; the last holds the last rank."""
        size, stride, block = self._pattern(axis)
        for outer in range(0, self.launch_world_size, size * stride):
            for first in range(outer, outer + stride, block):
                yield _members(first, size, stride, block)

    def _pattern(self, axis: Axis) -> tuple[int, int, int]:
        """(size, stride, block): a group is `size` blocks, each of `block` neighbours, whose first
        ranks are `stride` apart."""
        per_stage = self.pcp_size * self.tp_size
        match axis:
            case "tp":
                return self.tp_size, 1, 1
            case "dcp":
                return self.dcp_size, 1, 1
            case "pcp":
                return self.pcp_size, self.tp_size, 1
            case "pp":
                return self.pp_size, per_stage, 1
            case "dp":
                return self.dp_size, self.world_size, 1
            case "ep" | "eplb":
                return self.dp_size, self.world_size, per_stage

    def table(self) -> dict[str, Any]:
        """Everything above as one JSON-ready object (`aioengine layout --json`)."""
        return {
            "sizes": {name.removesuffix("_size"): size for name, size in asdict(self).items()},
            "world_size": self.world_size,
            "world_size_across_dp": self.world_size_across_dp,
            "launch_world_size": self.launch_world_size,
            "coords": [
                {"external_dp": external_dp, "dp": dp, "pp": pp, "pcp": pcp, "tp": tp}
                for external_dp in range(self.external_dp_size)
                for dp in range(self.dp_size)
                for pp in range(self.pp_size)
                for pcp in range(self.pcp_size)
                for tp in range(self.tp_size)
            ],
            "groups": {axis: list(map(list, self.groups(axis))) for axis in LISTED_AXES},
            "output_rank_in_replica": self.output_rank_in_replica,
            "leaders": list(self.leaders),
        }


def _members(first: int, size: int, stride: int, block: int) -> tuple[int, ...]:
    """The group whose first rank is `first`; for the numbers see `ParallelLayout._pattern`."""
    starts = range(first, first + size * stride, stride)
    if block == 1:
        return tuple(starts)
    return tuple(rank for start in starts for rank in range(start, start + block))


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where ranks are when the launcher fills node after node, as torchrun and srun do."""

    num_nodes: int
    ranks_per_node: int
    """GPUs of a node, or processes on CPU; the last node may have fewer ranks."""

    @classmethod
    def fit(cls, num_processes: int, *, nodes: int | None, gpus_per_node: int | None) -> "Nodes":
        """From one of the two numbers, or both. ValueError with the numbers when they do not fit
        the processes of the launch."""
        assert nodes is not None or gpus_per_node is not None
        if nodes is None:
            assert gpus_per_node is not None
            return cls(-(-num_processes // gpus_per_node), min(num_processes, gpus_per_node))
        if gpus_per_node is None:
            per_node, rest = divmod(num_processes, nodes)
            if rest or not per_node:
                raise ValueError(
                    f"{num_processes} processes cannot be shared evenly by --nodes {nodes}"
                )
            return cls(nodes, per_node)
        if nodes * gpus_per_node != num_processes:
            raise ValueError(
                f"{num_processes} processes do not fit --nodes {nodes} × --gpus-per-node "
                f"{gpus_per_node} = {nodes * gpus_per_node}, one process each"
            )
        return cls(nodes, gpus_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """Its number on its node, which chooses its device."""
        return rank % self.ranks_per_node

    def nodes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The nodes that ascending `ranks` are on, each once."""
        return tuple(dict.fromkeys(map(self.node_of, ranks)))

    def are_crossed(self, ranks: Sequence[int]) -> bool:
        """Whether ascending `ranks` are on more than one node."""
        return self.node_of(ranks[0]) != self.node_of(ranks[-1])
