"""The rank grid, over every layout of up to 16 ranks, and against the golden tables."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioengine.layout import AXES, Axis, Coords, ParallelLayout

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden" / "groups.json"
MAX_RANKS = 16


def every_layout() -> Iterator[ParallelLayout]:
    sizes = range(1, MAX_RANKS + 1)
    for num_ranks in sizes:
        divisors = [size for size in sizes if num_ranks % size == 0]
        for external_dp, dp, pp, pcp in itertools.product(divisors, repeat=4):
            tp, rest = divmod(num_ranks, external_dp * dp * pp * pcp)
            if rest or not tp:
                continue
            for dcp in (size for size in sizes if tp % size == 0):
                yield ParallelLayout(
                    external_dp_size=external_dp,
                    dp_size=dp,
                    pp_size=pp,
                    pcp_size=pcp,
                    tp_size=tp,
                    dcp_size=dcp,
                )


LAYOUTS = list(every_layout())


def test_coordinates_count_through_the_grid_with_tp_fastest() -> None:
    for layout in LAYOUTS:
        grid = itertools.product(
            range(layout.external_dp_size),
            range(layout.dp_size),
            range(layout.pp_size),
            range(layout.pcp_size),
            range(layout.tp_size),
        )
        expected = [Coords(*place) for place in grid]
        assert [layout.coords(rank) for rank in range(layout.launch_world_size)] == expected
        assert [layout.rank(coords) for coords in expected] == list(range(len(expected)))


@pytest.mark.parametrize("axis", AXES)
def test_the_groups_of_an_axis_partition_the_world(axis: Axis) -> None:
    for layout in LAYOUTS:
        groups = list(layout.groups(axis))
        assert sorted(itertools.chain(*groups)) == list(range(layout.launch_world_size))
        for group in groups:
            assert list(group) == sorted(group)
            assert all(layout.group(axis, rank) == group for rank in group)


def test_a_group_varies_its_own_axis_and_nothing_else() -> None:
    varying: dict[Axis, set[str]] = {
        "tp": {"tp"},
        "dcp": {"tp"},
        "pcp": {"pcp"},
        "pp": {"pp"},
        "dp": {"dp"},
        "ep": {"dp", "pcp", "tp"},
    }
    for layout in LAYOUTS:
        sizes = {
            "tp": layout.tp_size,
            "dcp": layout.dcp_size,
            "pcp": layout.pcp_size,
            "pp": layout.pp_size,
            "dp": layout.dp_size,
            "ep": layout.dp_size * layout.pcp_size * layout.tp_size,
        }
        for axis in AXES:
            for group in layout.groups(axis):
                assert len(group) == sizes[axis]
                places = [layout.coords(rank) for rank in group]
                for name in Coords.__slots__:
                    if name not in varying[axis]:
                        assert len({getattr(place, name) for place in places}) == 1


def test_tp_and_dcp_groups_are_runs_of_neighbours() -> None:
    for layout in LAYOUTS:
        for axis in ("tp", "dcp"):
            for group in layout.groups(axis):
                assert group == tuple(range(group[0], group[0] + len(group)))


def test_replicas_leaders_and_output_ranks() -> None:
    for layout in LAYOUTS:
        assert len(layout.leaders) == layout.num_replicas
        for leader in layout.leaders:
            replica = layout.replica(leader)
            assert replica[0] == leader
            assert all(layout.leader_of(rank) == leader for rank in replica)
            assert all(layout.replica(rank) == replica for rank in replica)
            first, last = layout.coords(leader), layout.coords(replica[-1])
            output = layout.coords(leader + layout.output_rank_in_replica)
            assert (first.pp, first.pcp, first.tp) == (0, 0, 0)
            assert (output.pp, output.pcp, output.tp) == (layout.pp_size - 1, 0, 0)
            assert (first.external_dp, first.dp) == (last.external_dp, last.dp)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden tables are beside the repository")
def test_the_golden_tables() -> None:
    def comparable(table: dict[str, object]) -> dict[str, object]:
        groups = table["groups"]
        assert isinstance(groups, dict)
        return table | {"groups": {axis: sorted(lines) for axis, lines in groups.items()}}

    golden = json.loads(GOLDEN.read_text())
    assert golden
    for table in golden:
        sizes = {f"{axis}_size": size for axis, size in table["sizes"].items()}
        assert comparable(ParallelLayout(**sizes).table()) == comparable(table)


def test_fit_finds_every_layout_again() -> None:
    for layout in LAYOUTS:
        inner = {
            "tp_size": layout.tp_size,
            "pp_size": layout.pp_size,
            "pcp_size": layout.pcp_size,
            "dcp_size": layout.dcp_size,
        }
        dp, external_dp = layout.dp_size, layout.external_dp_size
        world = layout.launch_world_size
        fit = ParallelLayout.fit
        assert fit(world, **inner, dp_size=dp, external_dp_size=external_dp) == layout
        assert fit(world, **inner, dp_size="auto", external_dp_size=external_dp) == layout
        assert fit(world, **inner, dp_size=dp, external_dp_size="auto") == layout


@pytest.mark.parametrize(
    ("num_processes", "sizes", "shown"),
    [
        (6, {"tp_size": 2, "pp_size": 2}, ["tp 2 × pp 2 = 4 processes", "the 6 that"]),
        (2, {"tp_size": 4}, ["tp 4 × pp 1 = 4 processes", "the 2 that"]),
        (4, {"tp_size": 2, "dp_size": 4}, ["tp 2 × pp 1 × dp 4 = 8 processes", "but 4 were"]),
        (8, {"tp_size": 2, "pcp_size": 3}, ["tp 2 × pp 1 × pcp 3 = 6 processes", "the 8 that"]),
        (8, {"external_dp_size": 3}, ["× external dp 3 = 3 processes", "the 8 that"]),
        (8, {"dp_size": 3, "external_dp_size": "auto"}, ["× dp 3 = 3 processes", "the 8 that"]),
        (8, {"dp_size": 2, "external_dp_size": 2}, ["× external dp 2 = 4 processes", "but 8 were"]),
    ],
)
def test_what_does_not_fit_shows_the_product_and_what_was_found(
    num_processes: int, sizes: dict[str, int], shown: list[str]
) -> None:
    with pytest.raises(ValueError, match="processes") as caught:
        ParallelLayout.fit(num_processes, **sizes)
    for part in shown:
        assert part in str(caught.value)


def test_both_auto_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot both be auto"):
        ParallelLayout.fit(4, dp_size="auto", external_dp_size="auto")


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-size must be at least 1, got 0"):
        ParallelLayout(tp_size=0)
    with pytest.raises(ValueError, match="--decode-context-parallel-size 2 must divide"):
        ParallelLayout(tp_size=3, dcp_size=2)


def test_coordinates_cost_nothing_in_a_huge_launch() -> None:
    layout = ParallelLayout(dp_size=10**6, pp_size=8, tp_size=8)
    last = layout.launch_world_size - 1
    assert layout.coords(last) == Coords(external_dp=0, dp=10**6 - 1, pp=7, pcp=0, tp=7)
    assert layout.group("pp", last) == tuple(range(last - 56, last + 1, 8))
    assert str(layout.coords(last)) == "dp999999 pp7 tp7"
