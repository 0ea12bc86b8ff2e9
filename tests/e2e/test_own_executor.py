"""A launch whose leader sends jobs through a class of the user's own, found on PYTHONPATH."""

from pathlib import Path

import aiohttp
import pytest
from support.launching import STORIES, Launch, post

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

MODULE = """
import logging
from aioengine.engine.executor import Executor

class Counting(Executor):
    num_plans = 0

    def submit(self, plan):
        self.num_plans += 1
        super().submit(plan)

    async def shut_down(self, timeout_s):
        logging.info("my executor sent %d plans", self.num_plans)
        await super().shut_down(timeout_s)
"""


async def test_a_launch_runs_on_an_executor_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "my_executor.py").write_text(MODULE)
    flags = ("--model", str(STORIES), "-tp", "2")
    backend = ("--distributed-executor-backend", "my_executor:Counting")
    env = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    with Launch(*flags, *backend, num_ranks=2, env=env) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
            await post(session, "/v1/completions", body)
        launch.terminate()
        launch.wait_end()
        assert int(launch.wait_line(r"my executor sent (\d+) plans")[1]) >= 8
        assert launch.log.count("ended in order") == 2
        assert not launch.pids_left()
