"""Four replicas share the work, and prompts that begin alike are computed once or little more."""

import asyncio
import random
from collections.abc import Sequence

import aiohttp
import pytest
from support.balance import (
    ask_all,
    by_engine,
    complete,
    distinct_prompts,
    minus,
    num_answers,
    num_cached_on_one_replica,
    prompt,
    prompts_with_prefixes,
    sessions,
)
from support.launching import STORIES, Launch, wait_metrics

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_REPLICAS = 4
NUM_SLOTS = 24
KV_BYTES = 2**26
"""Enough for every prompt."""
FLAGS = (
    *("--model", str(STORIES), "--max-num-seqs", str(NUM_SLOTS)),
    *("--kv-cache-memory-bytes", str(KV_BYTES)),
)


async def check_shares(front_ends: Sequence[aiohttp.ClientSession], count: int) -> None:
    before = await num_answers(front_ends)
    await ask_all(front_ends, distinct_prompts(count))
    counts = minus(await num_answers(front_ends), before)
    assert sum(counts) == count
    assert all(0.2 * count <= num <= 0.3 * count for num in counts), counts


async def check_hits(session: aiohttp.ClientSession, prompts: Sequence[list[int]]) -> None:
    """At least 90 % of what one replica would find, and no replica idles."""
    before = await by_engine(session, "prefix_cache_hits_total")
    answers = await num_answers([session])
    await ask_all([session], prompts)
    await wait_metrics(session, num_requests_running=0)
    hits = minus(await by_engine(session, "prefix_cache_hits_total"), before)
    assert sum(hits) >= 0.9 * num_cached_on_one_replica(prompts), hits
    assert min(minus(await num_answers([session]), answers)) >= len(prompts) / 8


async def check_salts(session: aiohttp.ClientSession) -> None:
    """Equal prompts go to one replica and share what it computed, under one salt only."""
    token_ids = prompt(random.Random(3), 200)
    cached = []
    for salt in ("a", "a", "b", "a"):
        before = await num_answers([session])
        answer = await complete(session, prompt=token_ids, max_tokens=1, cache_salt=salt)
        (place,) = (i for i, n in enumerate(minus(await num_answers([session]), before)) if n)
        cached.append((place, answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
    first, second, other, again = cached
    assert first[1] == other[1] == 0
    assert second == again == (first[0], 192)


async def check_priorities(session: aiohttp.ClientSession) -> None:
    """All slots of a replica are taken; when one becomes free, the urgent request gets it though
    it came later."""
    pin = {"X-data-parallel-rank": "2"}
    ended: list[str] = []

    async def ask(name: str, priority: int, max_tokens: int) -> None:
        body = {"prompt": [1, 5], "max_tokens": max_tokens, "priority": priority}
        async with session.post("/v1/completions", json=body, headers=pin) as response:
            assert response.status == 200
            ended.append(name)

    async with asyncio.TaskGroup() as tasks:
        body = {"prompt": [1, 7], "max_tokens": 300, "ignore_eos": True, "stream": True}
        streams = [
            await session.post("/v1/completions", json=body, headers=pin) for _ in range(NUM_SLOTS)
        ]
        for response in streams:
            await response.content.readline()
        tasks.create_task(ask("patient", 0, 60))
        await wait_metrics(session, num_requests_running=NUM_SLOTS, num_requests_waiting=1)
        tasks.create_task(ask("urgent", -1, 20))
        await wait_metrics(session, num_requests_running=NUM_SLOTS, num_requests_waiting=2)
        streams[0].close()
    assert ended == ["urgent", "patient"]
    for response in streams:
        response.close()


async def test_one_front_end() -> None:
    with Launch(*FLAGS, num_ranks=NUM_REPLICAS) as launch:
        async with sessions([launch.wait_ready()]) as (session,):
            await check_shares([session], 400)
            await check_hits(session, prompts_with_prefixes(12, 400, 320))
            await check_hits(session, prompts_with_prefixes(1, 440, 160))
            await check_salts(session)
            await check_priorities(session)


async def test_a_front_end_on_every_leader() -> None:
    with Launch(*FLAGS, "--api-ranks", "leaders", num_ranks=NUM_REPLICAS) as launch:
        urls = [
            launch.wait_line(rf"\[rank {rank} .*ready: .* at (\S+)", 240.0)[1]
            for rank in range(NUM_REPLICAS)
        ]
        async with sessions(urls) as front_ends:
            await check_shares(front_ends, 400)
            await check_shares(front_ends[3:], 400)
