"""Many streams at once: everyone gets what a lone request gets, and leavers free their blocks."""

import asyncio
import random

import aiohttp
import pytest
from support.launching import STORIES, Launch, post, stream, wait_metrics

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_STREAMS = 32
NUM_LEAVING = 8


@pytest.mark.parametrize("flags", [("-pp", "2"), ("-tp", "2"), ()], ids=["pp2", "tp2", "dp2"])
async def test_others_are_not_disturbed(flags: tuple[str, ...]) -> None:
    chance = random.Random(1)
    bodies = [
        {
            "prompt": [1, *(chance.randrange(3, 512) for _ in range(chance.randrange(2, 60)))],
            "max_tokens": chance.randrange(8, 120),
            "temperature": chance.choice([0, 0, 0.8]),
            "seed": index,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for index in range(NUM_STREAMS)
    ]
    leaving = set(chance.sample(range(NUM_STREAMS), NUM_LEAVING))
    with Launch("--model", str(STORIES), *flags, num_ranks=2) as launch:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(launch.wait_ready(), connector=connector) as session:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        leave_early(session, body)
                        if i in leaving
                        else stream(session, "/v1/completions", body)
                    )
                    for i, body in enumerate(bodies)
                ]
            figures = await wait_metrics(session, num_requests_running=0, num_requests_waiting=0)
            assert figures["aioengine:kv_cache_usage_perc"] == 0
            for i, body in enumerate(bodies):
                if i in leaving:
                    continue
                lone = await post(session, "/v1/completions", body)
                got = [
                    token_id
                    for event in running[i].result()
                    for token_id in event["choices"][0]["token_ids"]
                ]
                assert got == lone["choices"][0]["token_ids"]


async def leave_early(session: aiohttp.ClientSession, body: dict[str, object]) -> list[object]:
    """Read one event of a long stream and close the connection."""
    long_body = {**body, "max_tokens": 400, "stream": True}
    async with session.post("/v1/completions", json=long_body) as response:
        await response.content.readline()
        response.close()
    return []
