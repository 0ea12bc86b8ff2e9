"""Stale slots after an abort with pipeline stages and async scheduling (GHSA-v97p-wpxp-px84): what
one request left in its slot was fed into the next one's. Slots here are few and change hands all
the time; whoever goes on gets what it gets alone.
"""

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from support.golden_rows import check_rows
from support.launching import STORIES, Launch, golden, post, stream, wait_metrics

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_SLOTS = 6
NUM_STAYING = 60
NUM_LEAVING = 90
NUM_CLIENTS = 15
STATE: list[dict[str, Any]] = [
    {"presence_penalty": 2, "frequency_penalty": -2},
    {"repetition_penalty": 1.5},
    {"logit_bias": {str(token_id): 100 for token_id in range(300, 330)}},
    {"logit_bias": {str(token_id): -100 for token_id in range(256, 512)}},
    {"min_tokens": 20, "stop_token_ids": list(range(259, 459))},
    {"logprobs": 3},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.05},
    {"stop": ["the", ". "], "min_tokens": 5},
    {"n": 2},
    {"prompt_logprobs": 1},
    {"echo": True, "logprobs": 1},
]
"""What a slot, or a row on the device, remembers of its tenant."""


@pytest.mark.parametrize("flags", [("-pp", "2"), ("-pp", "2", "--no-async-scheduling")])
async def test_who_stays_gets_what_it_gets_alone(flags: tuple[str, ...]) -> None:
    slots = ["--max-num-seqs", str(NUM_SLOTS), "--max-num-batched-tokens", "32"]
    chance = random.Random(5)
    with Launch("--model", str(STORIES), *flags, *slots, num_ranks=2) as launch:
        url = launch.wait_ready()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            staying = [body_of(chance) for _ in range(NUM_STAYING)]
            jobs = [("stay", body) for body in staying]
            jobs += [("leave", body_of(chance)) for _ in range(NUM_LEAVING)]
            chance.shuffle(jobs)
            waiting = iter(jobs)
            found: dict[int, Any] = {}

            async def work() -> None:
                for kind, body in waiting:
                    if kind == "stay":
                        found[id(body)] = await whole(session, body)
                    else:
                        await leave(session, body, chance)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_CLIENTS):
                    tasks.create_task(work())
                tasks.create_task(check_rows(url, golden("stories260k_greedy")))
            figures = await wait_metrics(session, num_requests_running=0, num_requests_waiting=0)
            assert figures["aioengine:kv_cache_usage_perc"] == 0
            for body in staying:
                assert found[id(body)] == await whole(session, body), body
            await check_rows(url, golden("stories260k_greedy"))


def body_of(chance: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": [1, *(chance.randrange(3, 512) for _ in range(chance.randrange(1, 60)))],
        "max_tokens": chance.randrange(20, 60),
        "temperature": chance.choice([0, 0, 1.0]),
        "seed": chance.randrange(1000),
        "return_token_ids": True,
        "ignore_eos": chance.random() < 0.5,
    }
    for state in chance.sample(STATE, chance.randrange(4)):
        body |= state
    return body


async def whole(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices. Those without prompt log probabilities come as streams, put together."""
    if "prompt_logprobs" in body:
        choices = (await post(session, "/v1/completions", body))["choices"]
        return [{**choice, "token_ids": tuple(choice["token_ids"])} for choice in choices]
    by_index: dict[int, dict[str, Any]] = {}
    for event in await stream(session, "/v1/completions", body):
        for part in event["choices"]:
            joined = by_index.setdefault(
                part["index"], {"index": part["index"], "text": "", "token_ids": (), "logprobs": []}
            )
            joined["text"] += part["text"]
            joined["token_ids"] += tuple(part["token_ids"])
            joined["logprobs"] += (part["logprobs"] or {}).get("token_logprobs", [])
            joined["finish_reason"] = part["finish_reason"]
            joined["stop_reason"] = part["stop_reason"]
    return [by_index[index] for index in sorted(by_index)]


async def leave(
    session: aiohttp.ClientSession, body: dict[str, Any], chance: random.Random
) -> None:
    """Close the connection of a long request: while it waits, is prefilled or decodes."""
    is_stream = "prompt_logprobs" not in body and chance.random() < 0.8
    body = {**body, "max_tokens": 400, "ignore_eos": True, "stop": None, "stream": is_stream}
    num_lines = chance.choice([0, 0, 1, 2, 5, 20, 41])
    if is_stream and num_lines:
        await read_lines(session, body, num_lines)
        return
    async with asyncio.TaskGroup() as tasks:
        request = tasks.create_task(read_lines(session, body, 1))
        for _ in range(chance.randrange(1, 6)):  # round trips: how far the server has got with it
            async with session.get("/livez"):
                pass
        request.cancel()


async def read_lines(session: aiohttp.ClientSession, body: dict[str, Any], num_lines: int) -> None:
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        for _ in range(num_lines):
            await response.content.readline()
        response.close()
