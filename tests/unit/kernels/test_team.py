"""A team computes each chunk of each job exactly once, whatever its helpers are in."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from aioengine.kernels import team as team_module
from aioengine.kernels.atomics import add, load_acquire, relax, store_release
from aioengine.kernels.codegen import kernel
from aioengine.kernels.team import Team

MANY = os.cpu_count() or 1


@kernel
def count(args: int, chunk: int, thread: int) -> None:
    """Word `chunk` counts how often it was computed, and by threads of which numbers (in the upper
    half, where the numbers of threads add up)."""
    add(args + chunk * 8, 1 + (thread << 32))


@kernel
def meet(args: int, chunk: int, thread: int) -> None:
    """Chunks wait for each other: each needs a thread of its own."""
    add(args, 1)
    while load_acquire(args) < 2:
        relax()
    store_release(args + 8 + chunk * 8, thread + 1)


@pytest.fixture(params=[1, 2, 3, 4, 3 * MANY])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(request.param)
    yield team
    team.close()


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("helper")]


def run_and_check(team: Team, num_chunks: int) -> None:
    words = np.zeros(num_chunks + 1, np.int64)
    team.run(count.address, words.ctypes.data, num_chunks)
    assert (words[:-1] & 0xFFFFFFFF == 1).all()
    assert (words[:-1] >> 32 < team.num_threads).all()
    assert words[-1] == 0


def wait_until_asleep(team: Team) -> None:
    flags = team._words[team_module._HELPERS // 8 :: team_module._LINE // 8]
    while not flags[: team.num_threads - 1].all():
        os.sched_yield()


def test_each_chunk_is_computed_once(team: Team) -> None:
    random = np.random.default_rng(7)
    for num_chunks in random.integers(0, 300, 2000):
        run_and_check(team, int(num_chunks))


def test_jobs_of_one_size_do_not_mix(team: Team) -> None:
    """The number of chunks left is the same again and again, of other arguments each time."""
    words = np.zeros((3000, 2), np.int64)
    for row in words:
        team.run(count.address, row.ctypes.data, 2)
    assert (words & 0xFFFFFFFF == 1).all()


def test_helpers_that_sleep_are_woken_by_work() -> None:
    team = Team(2)
    for wake in (False, True) * 5:
        wait_until_asleep(team)
        if wake:
            team.wake()
        words = np.zeros(3, np.int64)
        team.run(meet.address, words.ctypes.data, 2)  # never returns without the helper
        assert sorted(words[1:]) == [1, 2]
    team.close()


@pytest.mark.parametrize("is_asleep", [False, True])
def test_closing_ends_the_helpers_and_leaves_the_caller_to_work(is_asleep: bool) -> None:
    before = helpers()
    num_open = len(os.listdir("/proc/self/fd"))
    team = Team(3)
    run_and_check(team, 20)
    if is_asleep:
        wait_until_asleep(team)
    team.close()
    assert helpers() == before
    assert len(os.listdir("/proc/self/fd")) == num_open
    run_and_check(team, 20)
    team.close()


def test_a_forgotten_team_ends() -> None:
    before = helpers()
    team = Team(2)
    assert len(helpers()) == len(before) + 1
    del team
    assert helpers() == before


def test_a_process_ends_while_helpers_spin() -> None:
    text = "from aioengine.kernels.team import Team\nteam = Team(4)"
    subprocess.run([sys.executable, "-c", text], check=True)
