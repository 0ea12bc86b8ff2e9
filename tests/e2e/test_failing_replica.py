"""A rank dies under many streams of two replicas; those of the other one do not notice."""

import asyncio
import os
import signal

import pytest
from support.chaos_case import pids_by_rank
from support.known_requests import known_requests
from support.launching import STORIES, Launch
from support.sightings import Streams, patient_session, summary

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_STREAMS = 16
"""On each replica."""
MAX_TOKENS = 150
VICTIM = 3


@pytest.mark.parametrize(
    "axis", ["-tp", pytest.param("-pp", marks=pytest.mark.chaos)], ids=["tp2-dp2", "pp2-dp2"]
)
async def test_only_its_own_streams_fail(axis: str) -> None:
    requests = 2 * await known_requests(NUM_STREAMS // 2, MAX_TOKENS)
    with Launch("--model", str(STORIES), axis, "2", num_ranks=4) as launch:
        async with (
            patient_session(launch.wait_ready()) as session,
            asyncio.TaskGroup() as tasks,
        ):
            pids = await pids_by_rank(session)
            streams = Streams(session, requests)
            await streams.start(tasks)
            os.kill(pids[VICTIM], signal.SIGKILL)
            failed, others = await streams.seen(1), await streams.seen(0)
        assert summary(failed) == f"{NUM_STREAMS} error"
        assert all(f"rank {VICTIM} (" in seen.message for seen in failed)
        assert summary(others) == f"{NUM_STREAMS} finished"
        launch.wait_end()
        assert not launch.pids_left()
