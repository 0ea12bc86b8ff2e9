"""The rank grid: pure arithmetic over ints.

Order, slowest first: ExternalDP × DP × PP × PCP × TP. A *replica* is one model copy: the
pp × pcp × tp ranks that share all slower coordinates. DCP does not add ranks: it cuts a tp group
into runs of `dcp_size`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Axis = Literal["tp", "dcp", "pcp", "pp", "dp", "ep"]
AXES: tuple[Axis, ...] = ("tp", "dcp", "pcp", "pp", "dp", "ep")


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
        pcp = f" pcp{self.pcp}" if self.pcp else ""
        return f"dp{self.dp} pp{self.pp}{pcp} tp{self.tp}"


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

    def replica(self, rank: int) -> range:
        """All ranks of the replica that holds `rank`."""
        leader = self.leader_of(rank)
        return range(leader, leader + self.world_size)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group on one axis, ascending."""
        per_stage = self.pcp_size * self.tp_size
        match axis:
            case "tp":
                return self._run(rank, self.tp_size, 1)
            case "dcp":
                return self._run(rank, self.dcp_size, 1)
            case "pcp":
                return self._run(rank, self.pcp_size, self.tp_size)
            case "pp":
                return self._run(rank, self.pp_size, per_stage)
            case "dp":
                return self._run(rank, self.dp_size, self.world_size)
            case "ep":  # all dp × pcp × tp ranks of one stage
                first = rank - rank % per_stage
                stage_mates = self._run(first, self.dp_size, self.world_size)
                return tuple(r + i for r in stage_mates for i in range(per_stage))

    def _run(self, rank: int, size: int, stride: int) -> tuple[int, ...]:
        """The `size` ranks that differ from `rank` only in the digit whose weight is `stride`."""
        first = rank - (rank // stride % size) * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """All groups of an axis, each once."""
        for rank in range(self.launch_world_size):
            group = self.group(axis, rank)
            if group[0] == rank:
                yield group

    def table(self) -> dict[str, Any]:
        """Everything above as one JSON-ready object (`aioengine layout --json`)."""
        return {
            "sizes": {name.removesuffix("_size"): size for name, size in asdict(self).items()},
            "world_size": self.world_size,
            "world_size_across_dp": self.world_size_across_dp,
            "launch_world_size": self.launch_world_size,
            "coords": [asdict(self.coords(rank)) for rank in range(self.launch_world_size)],
            "groups": {axis: [list(g) for g in self.groups(axis)] for axis in AXES},
            "output_rank_in_replica": self.output_rank_in_replica,
            "leaders": list(self.leaders),
        }
