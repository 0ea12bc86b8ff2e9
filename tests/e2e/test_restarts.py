"""Launchers that start the ranks again when one has failed: --max-restarts."""

import os
import re
import signal
import sys

import aiohttp
import pytest
from support.launching import STORIES, Launch, free_port, post, rank_pids

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

MODEL = ("--model", str(STORIES))
BODY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 20}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]
RANKS = ["--nproc-per-node", "2", "-m", "aioengine.launch"]
SERVE = [sys.executable, "-m", "aioengine.cli", "serve", "--max-restarts", "1"]


async def ask(launch: Launch, times: int) -> list[dict[str, object]]:
    """The choices of an answer, once the launch serves for that many times."""
    async with aiohttp.ClientSession(launch.wait_ready(times)) as session:
        return (await post(session, "/v1/completions", BODY))["choices"]


async def kill(launch: Launch, victim: int, times: int) -> None:
    async with aiohttp.ClientSession(launch.wait_ready(times)) as session:
        os.kill((await rank_pids(session))[victim], signal.SIGKILL)


async def test_torchrun_starts_again_on_the_same_port() -> None:
    """Whoever is killed, and twice. The line says nothing else that restarts would need."""
    port = str(free_port())
    with Launch(*MODEL, "-tp", "2", "--port", port, command=[*TORCHRUN, *RANKS]) as launch:
        before = await ask(launch, 1)
        for times, victim in enumerate((0, 1), 1):
            await kill(launch, victim, times)
            assert await ask(launch, times + 1) == before
        url = launch.wait_ready(3)
        assert url.endswith(f":{port}")
        async with aiohttp.ClientSession(url) as session:
            async with session.get("/server_info") as info:
                assert (await info.json())["restart_count"] == 2
            async with session.get("/metrics") as metrics:
                assert re.search("^aioengine:restart_count 2.0$", await metrics.text(), re.M)
        launch.terminate()
        launch.wait_end()
        assert launch.log.count("ended in order") == 2
        assert not launch.pids_left()


async def test_serve_starts_again_and_gives_up() -> None:
    with Launch(*MODEL, command=SERVE) as launch:
        before = await ask(launch, 1)
        await kill(launch, 0, 1)
        assert await ask(launch, 2) == before
        await kill(launch, 0, 2)
        assert launch.wait_end() == 1
        assert re.search(
            r"aioengine serve: rank 0 \(pid \d+\) ended first, with status -9", launch.log
        )
        assert not launch.pids_left()


def test_serve_wants_a_number_of_restarts() -> None:
    with Launch(*MODEL, "--max-restarts", "-1", command=SERVE) as launch:
        assert launch.wait_end() == 1
        assert "--max-restarts must be at least 0, found -1" in launch.log
