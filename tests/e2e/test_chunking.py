"""A long prompt gives the same tokens however it is cut, cached, or preempted."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from support.launching import Launch, post, scrape

PROMPT_IDS = [1, *((7 * i * i + 13 * i) % 40000 + 100 for i in range(299))]
BODY = {
    "prompt": PROMPT_IDS,
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
BLOCK_BYTES = 16 * 2 * 3 * 64 * 4 * 30
"""SmolLM2 in float32: tokens × (K, V) × heads × head size × bytes × layers."""


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Cut by nothing: one chunk, no prefix cache, twice."""
    flags = ["--max-num-batched-tokens", "4096", "--no-enable-prefix-caching"]
    first, second = asyncio.run(ask_twice(flags))
    token_ids: list[int] = first["choices"][0]["token_ids"]
    assert second["choices"][0]["token_ids"] == token_ids
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return token_ids


async def ask_twice(flags: Sequence[str]) -> list[dict[str, Any]]:
    with Launch("--dtype", "float32", *flags) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            return [await post(session, "/v1/completions", BODY) for _ in range(2)]


@pytest.mark.parametrize(
    ("budget", "caching"),
    [
        ("64", "--enable-prefix-caching"),
        ("64", "--no-enable-prefix-caching"),
        ("4096", "--enable-prefix-caching"),
    ],
)
async def test_same_tokens(expected: list[int], budget: str, caching: str) -> None:
    answers = await ask_twice(["--max-num-batched-tokens", budget, caching])
    for answer in answers:
        assert answer["choices"][0]["token_ids"] == expected
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached == [0, 288 if caching == "--enable-prefix-caching" else 0]


async def test_preemption(expected: list[int]) -> None:
    """Three growing requests in a cache that holds two and a half."""
    num_blocks = 40
    flags = [
        "--kv-cache-memory-bytes", str(num_blocks * BLOCK_BYTES),
        "--max-model-len", "400",
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    with Launch("--dtype", "float32", *flags) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            short = {**BODY, "prompt": PROMPT_IDS[:160], "max_tokens": 100}
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(post(session, "/v1/completions", short)) for _ in range(3)
                ]
                long = tasks.create_task(post(session, "/v1/completions", BODY))
            assert long.result()["choices"][0]["token_ids"] == expected
            texts = {tuple(o.result()["choices"][0]["token_ids"]) for o in others}
            assert len(texts) == 1
            assert (await scrape(session))["aioengine:num_preemptions_total"] > 0
