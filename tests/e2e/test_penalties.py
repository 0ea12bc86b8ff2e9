"""Penalised draws are the same however ranks are laid out, prompts cached or requests preempted."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from support.launching import SHARED, STORIES, Launch, golden, post, scrape

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared models")

NUM_OUTPUT = 60
BLOCK_BYTES = 16 * 2 * 4 * 8 * 4 * 5
"""stories260k in float32: tokens × (K, V) × heads × head size × bytes × layers."""


def bodies() -> list[dict[str, Any]]:
    """Seeded, with a mix of rules and prompts that are longer than a block."""
    rows = golden("stories260k_greedy")
    prompts = [row["prompt_ids"] + row["token_ids"][:40] for row in rows]
    rules: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.9, "presence_penalty": 0.5},
        {"repetition_penalty": 0.8, "frequency_penalty": 1.5, "min_tokens": NUM_OUTPUT},
        {"logit_bias": {"261": -100, "432": 4}, "presence_penalty": -1},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"min_tokens": 30, "stop_token_ids": [261, 432]},
    ]
    return [
        {
            "prompt": prompts[i % len(prompts)],
            "max_tokens": NUM_OUTPUT,
            "seed": i,
            "logprobs": 0,
            "return_token_ids": True,
            **rules[i % len(rules)],
        }
        for i in range(12)
    ]


async def ask(url: str) -> list[dict[str, Any]]:
    """All at the same time."""
    async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(post(session, "/v1/completions", b)) for b in bodies()]
    return [answer.result() for answer in answers]


def token_ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Nothing cached, in flight together or preempted."""
    flags = ["--no-enable-prefix-caching", "--no-async-scheduling", "--max-num-seqs", "1"]
    with Launch("--model", str(STORIES), *flags) as launch:
        return token_ids(asyncio.run(ask(launch.wait_ready())))


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (1, ["--async-scheduling"]),
        (1, ["--no-async-scheduling", "--max-num-batched-tokens", "16"]),
        (4, ["-tp", "2", "-pp", "2", "--max-num-batched-tokens", "48"]),
    ],
)
async def test_same_draws(expected: list[list[int]], num_ranks: int, flags: list[str]) -> None:
    """The second time prompts come from the prefix cache, and their tokens as history."""
    with Launch("--model", str(STORIES), *flags, num_ranks=num_ranks) as launch:
        url = launch.wait_ready()
        assert token_ids(await ask(url)) == expected
        again = await ask(url)
        assert token_ids(again) == expected
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in again]
        assert sum(cached) > 0


@pytest.mark.parametrize("caching", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
async def test_preemption(expected: list[list[int]], caching: str) -> None:
    flags = ["--kv-cache-memory-bytes", str(30 * BLOCK_BYTES), "--max-model-len", "256", caching]
    with Launch("--model", str(STORIES), *flags) as launch:
        url = launch.wait_ready()
        assert token_ids(await ask(url)) == expected
        async with aiohttp.ClientSession(url) as session:
            assert (await scrape(session))["aioengine:num_preemptions_total"] > 0


def test_the_rules_hold(expected: list[list[int]]) -> None:
    for body, output in zip(bodies(), expected, strict=True):
        assert len(output) >= body.get("min_tokens", 0)
        assert 261 not in output or "logit_bias" not in body
        if "stop_token_ids" in body:
            assert not set(body["stop_token_ids"]).intersection(output[:30])
