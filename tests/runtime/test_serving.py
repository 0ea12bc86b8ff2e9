"""The HTTP side of a rank at the end of a job: when a drain begins and how long it lasts."""

import asyncio
import os
import signal

import pytest
from support.fake_leaders import front_end_with_leaders
from support.launching import STORIES
from support.tiny_model import detokenizer, ids

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.control.deadline import Deadline
from aioengine.control.signals import Signals
from aioengine.control.walltime import RESERVE_S, Walltime
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.errors import RequestFailedError
from aioengine.frontend.records import ChoiceSpec
from aioengine.frontend.tracer import Tracer
from aioengine.layout import ParallelLayout
from aioengine.messages import ChoiceParams, DrainRequested, Shutdown
from aioengine.rank.place import Place
from aioengine.rank.serving import HttpService

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

LONG_S = 600.0


class Job:
    """One rank's HTTP side, in a job whose clock stands `left_s` before its end."""

    def __init__(self, left_s: float | None, margin_s: float, shutdown_timeout: float) -> None:
        self.walltime = Walltime(left_s, margin_s, lambda: 0.0)
        self.signals = Signals(shutdown_timeout, watch_parent=False)
        self.front_end, (self.leader,) = front_end_with_leaders(1, walltime=self.walltime)
        source = resolve_model(str(STORIES), LONG_S)
        model = read_model_config(source)
        place = Place(
            EngineConfig(port=0),
            LauncherEnv(kind="none"),
            ParallelLayout(),
            "127.0.0.1",
            Deadline(LONG_S),
            self.walltime,
        )
        self.service = HttpService(
            place, self.front_end, Tracer([], 0, b"key"), self.signals, model, source
        )

    async def cut_off_answer(self, tasks: asyncio.TaskGroup) -> str:
        """With an answer in flight that the leader never ends; returns the error that ends it."""
        tasks.create_task(self.service.run())
        self.leader.ready()
        await self.front_end.started.wait()
        params = ChoiceParams(max_tokens=9)
        spec = ChoiceSpec(prompt_ids=ids("a"), params=params, detokenizer=detokenizer())
        async with self.front_end.generate([spec]) as answer:
            with pytest.raises(RequestFailedError) as failed:
                async for _ in answer:
                    pass
        await self.leader.next(Shutdown)
        return str(failed.value)


async def test_a_drain_begins_by_itself_and_lasts_until_shortly_before_the_end() -> None:
    """Not for --shutdown-timeout, which may be longer or shorter."""
    job = Job(left_s=RESERVE_S + 0.2, margin_s=60.0, shutdown_timeout=LONG_S)
    async with asyncio.timeout(LONG_S / 10), asyncio.TaskGroup() as tasks:
        assert await job.cut_off_answer(tasks) == job.walltime.cause
    assert job.signals.is_for_walltime


@pytest.mark.parametrize("by", ["this rank", "another rank"])
async def test_a_signal_before_the_margin_gives_all_that_is_left(by: str) -> None:
    job = Job(left_s=RESERVE_S + 0.2, margin_s=0.0, shutdown_timeout=LONG_S)
    async with asyncio.timeout(LONG_S / 10), asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(job.cut_off_answer(tasks))
        await job.front_end.started.wait()
        if by == "this rank":
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            job.leader.send(DrainRequested(1, for_walltime=True))
        assert await answer == job.walltime.cause


async def test_without_a_walltime_the_shutdown_timeout_counts() -> None:
    job = Job(left_s=None, margin_s=60.0, shutdown_timeout=0.2)
    async with asyncio.timeout(LONG_S / 10), asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(job.cut_off_answer(tasks))
        await job.front_end.started.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert await answer == "walltime: the job is about to end"


async def test_sigterm_at_the_end_cuts_off_what_is_left() -> None:
    job = Job(left_s=LONG_S, margin_s=0.0, shutdown_timeout=LONG_S)
    async with asyncio.timeout(LONG_S / 10), asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(job.cut_off_answer(tasks))
        await job.front_end.started.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        await job.signals.first.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await answer == job.walltime.cause
