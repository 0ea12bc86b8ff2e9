"""Ranks that srun starts: no agent watches them, they meet at a port of their own."""

import os
import signal
import time

import aiohttp
import pytest
from support.golden_rows import check_rows
from support.launching import SHARED, STORIES, Launch, golden
from support.starters import srun

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values")

MODEL = ("--model", str(STORIES))


@pytest.mark.parametrize(
    ("num_tasks", "flags"),
    [
        (4, ("-tp", "2", "-pp", "2")),
        pytest.param(8, ("-tp", "2", "-pp", "2"), marks=pytest.mark.layouts),
    ],
)
async def test_a_step_serves_and_drains(num_tasks: int, flags: tuple[str, ...]) -> None:
    """scancel sends SIGTERM to every task, and all end with status 0."""
    with Launch(*MODEL, *flags, command=srun(num_tasks)) as launch:
        await check_rows(launch.wait_ready(), golden("stories260k_greedy"))
        launch.terminate()
        assert launch.wait_end() == 0
        assert launch.log.count("ended in order") == num_tasks
        assert not launch.pids_left()


async def test_a_killed_task_ends_its_step() -> None:
    """Nobody tells the other task: srun does not without --kill-on-bad-exit."""
    with Launch(*MODEL, "-tp", "2", command=srun(2)) as launch:
        url = launch.wait_ready()
        await check_rows(url, golden("stories260k_greedy"))
        async with aiohttp.ClientSession(url) as session, session.get("/server_info") as info:
            ranks = (await info.json())["replicas"][0]["ranks"]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        assert launch.wait_end(10.0) == 128 + signal.SIGKILL
        assert "first failure: rank 1 (dp0 pp0 tp1)" in launch.log
        assert not launch.pids_left()


async def test_a_job_that_is_about_to_end() -> None:
    """No task starts to load what would never be served."""
    job = srun(2, job_end=int(time.time()) + 50)
    with Launch(*MODEL, "-pp", "2", "--walltime-margin", "60", command=job) as launch:
        assert launch.wait_end() == 1
        refusal = "--walltime-margin 60: nothing would be served; walltime: the job ends at "
        assert launch.log.count(refusal) == 2
        assert not launch.pids_left()


async def test_srun_torchrun() -> None:
    """torchrun, of which srun starts one per node, places the ranks."""
    task = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
    }
    with Launch(*MODEL, "-pp", "2", num_ranks=2, env=task) as launch:
        await check_rows(launch.wait_ready(), golden("stories260k_greedy"))
        assert launch.log.count("; ignored srun: SLURM_PROCID=0 SLURM_NTASKS=1 ") == 2
