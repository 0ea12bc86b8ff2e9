"""64 streams with every kind of parameter at once, 16 clients leaving: the others get what a lone
request gets. AIOENGINE_TEST_ROUNDS repeats it with other requests."""

import asyncio
import os
import random
from typing import Any

import aiohttp
import pytest
from support.launching import STORIES, Launch, post, stream, wait_metrics

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_STREAMS = 64
NUM_LEAVING = 16
ROUNDS = int(os.environ.get("AIOENGINE_TEST_ROUNDS", "1"))


@pytest.mark.parametrize(
    ("flags", "max_tokens"),
    [(("-pp", "2"), 60), (("-tp", "2", "-pp", "2"), 20)],
    ids=["pp2-dp2", "tp2-pp2"],
)
async def test_mixed_streams(flags: tuple[str, ...], max_tokens: int) -> None:
    with Launch("--model", str(STORIES), *flags, num_ranks=4) as launch:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(launch.wait_ready(), connector=connector) as session:
            for seed in range(ROUNDS):
                await check_round(session, random.Random(seed), max_tokens)


async def check_round(
    session: aiohttp.ClientSession, chance: random.Random, max_tokens: int
) -> None:
    bodies = [mixed_body(chance, max_tokens) for _ in range(NUM_STREAMS)]
    leaving = set(chance.sample(range(NUM_STREAMS), NUM_LEAVING))
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                leave_early(session, body, chance.randrange(1, 6))
                if index in leaving
                else stream(session, "/v1/completions", body)
            )
            for index, body in enumerate(bodies)
        ]
    figures = await wait_metrics(session, num_requests_running=0, num_requests_waiting=0)
    assert figures["aioengine:kv_cache_usage_perc"] == 0
    for index, body in enumerate(bodies):
        if index not in leaving:
            lone = await post(session, "/v1/completions", body)
            assert joined(running[index].result()) == outcome(lone["choices"]), body


def mixed_body(chance: random.Random, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": [1, *(chance.randrange(3, 512) for _ in range(chance.randrange(1, 50)))],
        "max_tokens": chance.randrange(4, max_tokens),
        "temperature": chance.choice([0, 0.7, 1.3]),
        "seed": chance.randrange(1000),
        "return_token_ids": True,
    }
    options: dict[str, Any] = {
        "presence_penalty": 0.8,
        "frequency_penalty": -0.4,
        "repetition_penalty": 1.2,
        "logprobs": 2,
        "n": 2,
        "stop": ["the", ". "],
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "min_tokens": 3,
        "ignore_eos": True,
        "logit_bias": {"400": 3.5, "2": -100},
    }
    for name in chance.sample(sorted(options), chance.randrange(5)):
        body[name] = options[name]
    return body


async def leave_early(
    session: aiohttp.ClientSession, body: dict[str, Any], num_lines: int
) -> list[dict[str, Any]]:
    """Read some lines of a long stream and close the connection."""
    long_body = {**body, "max_tokens": 300, "ignore_eos": True, "stream": True, "stop": None}
    async with session.post("/v1/completions", json=long_body) as response:
        for _ in range(num_lines):
            await response.content.readline()
        response.close()
    return []


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "token_ids": []})
            whole["text"] += part["text"]
            whole["token_ids"] += part["token_ids"]
            whole["finish_reason"] = part["finish_reason"]
    return choices


def outcome(choices: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    names = ("text", "token_ids", "finish_reason")
    return {choice["index"]: {name: choice[name] for name in names} for choice in choices}
