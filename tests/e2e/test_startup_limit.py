"""A rank that does not come, or is stopped on the way: all others name it and leave in time.

The ranks are started one by one with the launcher's variables, so that nothing ends them but
themselves.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from support.launching import STORIES, Launch
from support.single_ranks import SingleRanks

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

LIMIT_S: Final = 10
MARGIN_S: Final = 3
FLAGS: Final = ("--model", str(STORIES), "--startup-timeout-seconds", str(LIMIT_S))


@contextmanager
def launched_ranks(ranks: list[int], world_size: int, *flags: str) -> Iterator[dict[int, Launch]]:
    """Some of the ranks of a launch."""
    with SingleRanks(world_size, *FLAGS, *flags) as single:
        yield {rank: single.start(rank) for rank in ranks}


def check_ends(launches: dict[int, Launch], started: float, named: str) -> None:
    """Every rank ends in time, not with 0, and says who was missing."""
    for rank, launch in launches.items():
        status = launch.wait_end(LIMIT_S + MARGIN_S - (time.monotonic() - started))
        assert status in (1, 71), f"rank {rank} ended with {status}"
        last_errors = [line for line in launch.log.splitlines() if " ERROR " in line]
        assert any(re.search(named, line) for line in last_errors), launch.log


def test_a_rank_that_never_comes_is_named_by_all() -> None:
    started = time.monotonic()
    with launched_ranks([0, 1, 2], 4, "-tp", "2", "-pp", "2") as launches:
        check_ends(launches, started, r"rank 3 of 4 did not arrive .*seconds 10; hosts seen so far")


@pytest.mark.layouts
def test_without_rank_0_the_others_say_so() -> None:
    started = time.monotonic()
    with launched_ranks([1], 2, "-tp", "2") as launches:
        check_ends(launches, started, "rank 1: rank 0 did not answer within --startup-timeout")


@pytest.mark.parametrize("stopped", [0, pytest.param(2, marks=pytest.mark.layouts)])
def test_a_rank_stopped_while_groups_are_built_is_named_by_all(stopped: int) -> None:
    """Rank 0 leads: the others find by themselves that it is silent."""
    started = time.monotonic()
    with launched_ranks([0, 1, 2], 3, "-tp", "3", "--no-kill-frozen") as launches:
        frozen = launches.pop(stopped)
        frozen.wait_line("computing on cpu")
        os.kill(frozen.process.pid, signal.SIGSTOP)
        check_ends(launches, started, rf"first failure: .*rank {stopped} .*seconds 10")


@pytest.mark.layouts
def test_a_rank_stopped_before_it_has_joined_is_named_by_all() -> None:
    started = time.monotonic()
    with launched_ranks([0, 1, 2], 3, "-tp", "3") as launches:
        frozen = launches.pop(1)
        frozen.wait_line("launcher: torchrun")
        os.kill(frozen.process.pid, signal.SIGSTOP)
        check_ends(launches, started, "rank 1 of 3 did not arrive|rank 1 .* within --startup")
