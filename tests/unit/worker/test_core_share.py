"""Which cores a rank computes on."""

import os
import subprocess
import sys

import pytest

from aioengine.openmp_waits import CHOICES
from aioengine.worker import device
from aioengine.worker.device import CoreShare, core_share

EIGHT = frozenset(range(8))


def shares(cores: frozenset[int], launcher: frozenset[int], num_ranks: int) -> list[CoreShare]:
    return [core_share(cores, launcher, rank, num_ranks) for rank in range(num_ranks)]


@pytest.fixture(autouse=True)
def flat_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_place_of_core", lambda core: (0, core, core))


def test_ranks_of_a_launcher_that_binds_nobody_get_equal_parts() -> None:
    assert shares(EIGHT, EIGHT, 2) == [CoreShare(4, (0, 1, 2, 3)), CoreShare(4, (4, 5, 6, 7))]
    assert shares(EIGHT, EIGHT, 3) == [
        CoreShare(2, (0, 1)),
        CoreShare(2, (2, 3)),
        CoreShare(2, (4, 5)),
    ]


def test_siblings_of_a_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_place_of_core", lambda core: (0, core % 4, core))
    assert shares(EIGHT, EIGHT, 2) == [CoreShare(4, (0, 4, 1, 5)), CoreShare(4, (2, 6, 3, 7))]


def test_one_rank_goes_where_it_likes() -> None:
    assert core_share(EIGHT, EIGHT, 0, 1) == CoreShare(8)


@pytest.mark.parametrize("num_ranks", [5, 8, 20])
def test_a_part_of_one_core_is_not_enforced(num_ranks: int) -> None:
    assert shares(EIGHT, EIGHT, num_ranks) == [CoreShare(1)] * num_ranks


def test_ranks_that_were_bound_stay_where_they_are() -> None:
    """By srun to cores of their own, on a node that has others; by mpirun two to a socket."""
    assert core_share(frozenset({4, 5, 6, 7}), EIGHT, 1, 2) == CoreShare(4)
    assert core_share(frozenset({2, 3}), frozenset(range(64)), 1, 2) == CoreShare(2)
    assert core_share(frozenset({4, 5, 6, 7}), EIGHT, 3, 4) == CoreShare(2)


TORCH_WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.exit()
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.parametrize(
    ("chosen", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "active"), ({"KMP_BLOCKTIME": "1"}, "None")],
)
@pytest.mark.parametrize("program", ["import aioengine.launch", "import aioengine.cli.main, torch"])
def test_openmp_is_told_how_to_wait_before_torch_is_there(
    program: str, chosen: dict[str, str], policy: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    output = subprocess.check_output(
        [sys.executable, "-c", TORCH_WATCH + program], env=environment | chosen, text=True
    )
    assert output.strip() == policy
