"""The rank grid, over every grid of up to 64 ranks, and against the golden tables."""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine import layout as layout_module
from aioengine.layout import AXES, LISTED_AXES, Axis, Coords, Nodes, ParallelLayout

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden" / "groups.json"
MAX_RANKS = 64


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def every_grid() -> Iterator[ParallelLayout]:
    for num_ranks in range(1, MAX_RANKS + 1):
        for external_dp in divisors(num_ranks):
            for dp in divisors(num_ranks // external_dp):
                for pp in divisors(num_ranks // external_dp // dp):
                    for pcp in divisors(num_ranks // external_dp // dp // pp):
                        yield ParallelLayout(
                            external_dp_size=external_dp,
                            dp_size=dp,
                            pp_size=pp,
                            pcp_size=pcp,
                            tp_size=num_ranks // external_dp // dp // pp // pcp,
                        )


GRIDS = list(every_grid())
SMALL = [grid for grid in GRIDS if grid.launch_world_size <= 16]


def with_dcp(grid: ParallelLayout, dcp_size: int) -> ParallelLayout:
    return ParallelLayout(
        external_dp_size=grid.external_dp_size,
        dp_size=grid.dp_size,
        pp_size=grid.pp_size,
        pcp_size=grid.pcp_size,
        tp_size=grid.tp_size,
        dcp_size=dcp_size,
    )


Place = tuple[int, int, int, int, int]
"""external dp, dp, pp, pcp, tp."""


def places(layout: ParallelLayout) -> Iterator[Place]:
    """What the ranks' coordinates are: a count with the last place fastest."""
    return itertools.product(
        range(layout.external_dp_size),
        range(layout.dp_size),
        range(layout.pp_size),
        range(layout.pcp_size),
        range(layout.tp_size),
    )


def grouped(layout: ParallelLayout, fixed: Callable[[Place], object]) -> list[tuple[int, ...]]:
    """The ranks whose `fixed` coordinates are equal, by first rank."""
    lines: dict[object, list[int]] = defaultdict(list)
    for rank, place in enumerate(places(layout)):
        lines[fixed(place)].append(rank)
    return list(map(tuple, lines.values()))


FIXED: dict[Axis, Callable[[Place], object]] = {
    "tp": lambda p: p[:4],
    "pcp": lambda p: (*p[:3], p[4]),
    "pp": lambda p: (*p[:2], *p[3:]),
    "dp": lambda p: (p[0], *p[2:]),
    "ep": lambda p: (p[0], p[2]),
    "eplb": lambda p: (p[0], p[2]),
}
"""What the ranks of a group have in common, by axis. dcp depends on its size: see its test."""


def test_coordinates_count_through_the_grid_with_tp_fastest() -> None:
    for layout in GRIDS:
        expected = list(itertools.starmap(Coords, places(layout)))
        assert [layout.coords(rank) for rank in range(layout.launch_world_size)] == expected
        assert [layout.rank(coords) for coords in expected] == list(range(len(expected)))


def assert_groups(layout: ParallelLayout, axis: Axis, expected: list[tuple[int, ...]]) -> None:
    assert list(layout.groups(axis)) == expected
    assert layout.num_groups(axis) == len(expected)
    assert {len(group) for group in expected} == {layout.group_size(axis)}
    for group in expected:
        assert layout.group(axis, group[0]) == layout.group(axis, group[-1]) == group


@pytest.mark.parametrize("axis", FIXED)
def test_groups_hold_the_other_axes_fixed(axis: Axis) -> None:
    for layout in GRIDS:
        assert_groups(layout, axis, grouped(layout, FIXED[axis]))


def test_dcp_cuts_tp_groups_into_runs_and_nothing_else() -> None:
    for grid in GRIDS:
        for dcp_size in divisors(grid.tp_size)[1:]:
            ranks = range(grid.launch_world_size)
            runs = [tuple(ranks[i : i + dcp_size]) for i in ranks[::dcp_size]]
            assert_groups(with_dcp(grid, dcp_size), "dcp", runs)
    for grid in SMALL:
        for dcp_size, axis in itertools.product(divisors(grid.tp_size), FIXED):
            assert list(with_dcp(grid, dcp_size).groups(axis)) == list(grid.groups(axis))


def test_the_groups_of_an_axis_partition_the_world() -> None:
    for layout, axis in itertools.product(SMALL, AXES):
        groups = list(layout.groups(axis))
        assert sorted(itertools.chain(*groups)) == list(range(layout.launch_world_size))
        for group in groups:
            assert all(layout.group(axis, rank) == group for rank in group)


def test_tp_groups_are_neighbours() -> None:
    for layout in GRIDS:
        for group in layout.groups("tp"):
            assert group == tuple(range(group[0], group[0] + layout.tp_size))


def test_replicas_leaders_and_output_ranks() -> None:
    for layout in GRIDS:
        assert len(layout.leaders) == layout.num_replicas
        for leader in layout.leaders:
            replica = layout.replica(leader)
            output_rank = layout.output_rank_of(leader)
            assert replica[0] == leader
            for rank in (replica[0], replica[-1]):
                assert layout.leader_of(rank) == leader
                assert layout.replica(rank) == replica
                assert layout.output_rank_of(rank) == output_rank
            first, last = layout.coords(leader), layout.coords(replica[-1])
            output = layout.coords(output_rank)
            assert output_rank == leader + layout.output_rank_in_replica
            assert (first.pp, first.pcp, first.tp) == (0, 0, 0)
            assert (output.pp, output.pcp, output.tp) == (layout.pp_size - 1, 0, 0)
            assert (first.external_dp, first.dp) == (last.external_dp, last.dp)


def test_sampled_ids_go_to_the_ranks_that_embed() -> None:
    for layout in SMALL:
        for rank in range(layout.launch_world_size):
            replica = layout.replica(rank)
            embedding = [other for other in replica if layout.coords(other).pp == 0]
            expected = sorted({*embedding, layout.output_rank_of(rank)})
            assert list(layout.feedback_ranks(rank)) == expected


def test_a_world_is_a_replica_or_everything() -> None:
    layout = ParallelLayout(external_dp_size=2, dp_size=2, pp_size=2, tp_size=2)
    assert layout.world_of(5, one_world=False) == range(4, 8)
    assert layout.world_of(5, one_world=True) == range(16)
    for axis in ("tp", "pp", "pcp", "dcp"):  # what a dense model builds stays inside its world
        for rank in range(layout.launch_world_size):
            assert set(layout.group(axis, rank)) <= set(layout.world_of(rank, one_world=False))


def test_a_dense_model_has_no_expert_group() -> None:
    layout = ParallelLayout(dp_size=2, pp_size=2, tp_size=2)
    assert layout.expert_ranks(6, is_mixture=True) == (2, 3, 6, 7)
    with pytest.raises(ValueError, match="a dense model has no experts"):
        layout.expert_ranks(6, is_mixture=False)


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
    for layout in SMALL:
        inner = {
            "tp_size": layout.tp_size,
            "pp_size": layout.pp_size,
            "pcp_size": layout.pcp_size,
            "dcp_size": layout.tp_size,
        }
        dp, external_dp = layout.dp_size, layout.external_dp_size
        world = layout.launch_world_size
        fit = ParallelLayout.fit
        layout = with_dcp(layout, layout.tp_size)
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


def test_external_dp_is_what_a_trainers_world_leaves_over() -> None:
    layout = ParallelLayout.fit(16, tp_size=4, dp_size=1, external_dp_size="auto")
    assert layout == ParallelLayout(external_dp_size=4, tp_size=4)
    assert str(layout.coords(13)) == "xdp3 dp0 pp0 tp1"


def test_coordinates_cost_nothing_in_a_huge_launch() -> None:
    layout = ParallelLayout(dp_size=10**6, pp_size=8, tp_size=8)
    last = layout.launch_world_size - 1
    assert layout.coords(last) == Coords(external_dp=0, dp=10**6 - 1, pp=7, pcp=0, tp=7)
    assert layout.group("pp", last) == tuple(range(last - 56, last + 1, 8))
    assert str(layout.coords(last)) == "dp999999 pp7 tp7"


@given(sizes=st.tuples(*[st.integers(1, 12)] * 5), data=st.data())
def test_places_in_large_grids(sizes: Place, data: st.DataObject) -> None:
    layout = ParallelLayout(
        external_dp_size=sizes[0],
        dp_size=sizes[1],
        pp_size=sizes[2],
        pcp_size=sizes[3],
        tp_size=sizes[4],
    )
    rank = data.draw(st.integers(0, layout.launch_world_size - 1))
    coords = layout.coords(rank)
    assert layout.rank(coords) == rank
    for name, size in zip(Coords.__slots__, sizes, strict=True):
        assert 0 <= getattr(coords, name) < size
    for axis in AXES:
        group = layout.group(axis, rank)
        assert rank in group
        assert len(group) == layout.group_size(axis)
        assert layout.group(axis, group[0]) == layout.group(axis, group[-1]) == group


def test_the_table_of_a_large_launch_computes_each_group_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    members = layout_module._members

    def counted(*pattern: int) -> tuple[int, ...]:
        calls.append(pattern)
        return members(*pattern)

    monkeypatch.setattr(layout_module, "_members", counted)
    layout = ParallelLayout(dp_size=3125, pp_size=4, tp_size=8)
    table = layout.table()
    assert len(table["coords"]) == 100_000
    assert len(calls) == sum(layout.num_groups(axis) for axis in LISTED_AXES)


# --- nodes


def test_nodes_are_filled_one_after_the_other() -> None:
    nodes = Nodes.fit(8, nodes=2, gpus_per_node=4)
    assert nodes == Nodes.fit(8, nodes=2, gpus_per_node=None) == Nodes(2, 4)
    assert [(nodes.node_of(rank), nodes.local_rank(rank)) for rank in (0, 3, 4, 7)] == [
        (0, 0),
        (0, 3),
        (1, 0),
        (1, 3),
    ]
    assert Nodes.fit(10, nodes=None, gpus_per_node=4) == Nodes(3, 4)
    assert Nodes.fit(2, nodes=None, gpus_per_node=8) == Nodes(1, 2)


def test_a_group_crosses_when_its_ranks_are_on_several_nodes() -> None:
    for layout in SMALL:
        nodes = Nodes.fit(layout.launch_world_size, nodes=None, gpus_per_node=3)
        for axis in AXES:
            for group in layout.groups(axis):
                on = {nodes.node_of(rank) for rank in group}
                assert nodes.are_crossed(group) == (len(on) > 1)
                assert nodes.nodes_of(group) == tuple(sorted(on))


@pytest.mark.parametrize(
    ("num_processes", "nodes", "gpus_per_node", "message"),
    [
        (8, 3, None, "8 processes cannot be shared evenly by --nodes 3"),
        (2, 4, None, "2 processes cannot be shared evenly by --nodes 4"),
        (12, 2, 8, "12 processes do not fit --nodes 2 × --gpus-per-node 8 = 16"),
        (32, 2, 8, "32 processes do not fit --nodes 2 × --gpus-per-node 8 = 16"),
    ],
)
def test_processes_that_do_not_fit_the_nodes(
    num_processes: int, nodes: int, gpus_per_node: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Nodes.fit(num_processes, nodes=nodes, gpus_per_node=gpus_per_node)
