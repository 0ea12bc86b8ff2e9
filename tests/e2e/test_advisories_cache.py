"""Advisories on the prefix cache: who does not know a salt learns nothing of what was cached with
it. CVE-2025-46570 (GHSA-4qjh-9fv9-r85r): the time to the first token told what others had asked."""

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from support.launching import STORIES, Launch, post, scrape

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_PROMPT_TOKENS = 200
NUM_CACHED = 192
"""Whole blocks of 16 before the last token."""
SALTS = [
    *("a", "b", "A", "a ", " a", "aa", "é", "e\u0301", "\x00", "a\x00", "0", "0:", ":", ":a"),
    *("0:a", "null", "🙂" * 256, "x" * 256, "x" * 255, '"', "../a", "%61", "\u202ea"),
]
"""No two mean the same, and each is taken (CVE-2026-105756: an odd one ended the engine)."""


async def test_a_salt_shares_with_itself_alone() -> None:
    with Launch("--model", str(STORIES)) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            body = prompt_body()
            plain = await cached_and_text(session, body)
            assert plain[0] == 0
            for salt in SALTS:
                first, again = [
                    await cached_and_text(session, {**body, "cache_salt": salt}) for _ in range(2)
                ]
                assert first == plain, salt
                assert again == (NUM_CACHED, plain[1]), salt
            for unsalted in ({}, {"cache_salt": None}, {"cache_salt": ""}):
                assert await cached_and_text(session, {**body, **unsalted}) == (
                    NUM_CACHED,
                    plain[1],
                )
            await check_together(session)


async def check_together(session: aiohttp.ClientSession) -> None:
    """Salts that are in flight at the same time share nothing either, and get the same tokens."""
    body = {**prompt_body(seed=2), "n": 2}
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(post(session, "/v1/completions", {**body, "cache_salt": salt}))
            for salt in SALTS[:8]
        ]
    answers = [task.result() for task in asked]
    texts = {choice["text"] for answer in answers for choice in answer["choices"]}
    assert len(texts) == 1
    for answer in answers:  # the first choice of each had nobody to share with
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def prompt_body(seed: int = 1) -> dict[str, Any]:
    chance = random.Random(seed)
    prompt = [1, *(chance.randrange(3, 512) for _ in range(NUM_PROMPT_TOKENS - 1))]
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def cached_and_text(
    session: aiohttp.ClientSession, body: dict[str, Any]
) -> tuple[float, str]:
    """What the answer says was cached, which is what the metrics count; and the text."""
    before = await num_hits(session)
    answer = await post(session, "/v1/completions", body)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert await num_hits(session) - before == cached
    return cached, answer["choices"][0]["text"]


async def num_hits(session: aiohttp.ClientSession) -> float:
    return (await scrape(session))["aioengine:prefix_cache_hits_total"]
