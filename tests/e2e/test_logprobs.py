"""Log probabilities over HTTP equal the float32 references, however prompts are cut and ranks laid
out."""

from typing import Any

import aiohttp
import pytest
from support.launching import SHARED, STORIES, Launch, golden, post

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values")

TOLERANCE = 3e-4
NUM_TOP = 5
STORIES_CONTEXT = 512
LAYOUTS = {"one": (1, ()), "tp2-pp2": (4, ("-tp", "2", "-pp", "2"))}


@pytest.mark.parametrize(
    ("layout", "budget"),
    [
        ("one", 4),
        ("one", 16),
        ("one", 2048),
        ("tp2-pp2", 4),
        pytest.param("tp2-pp2", 16, marks=pytest.mark.layouts),
        ("tp2-pp2", 2048),
    ],
)
async def test_stories(layout: str, budget: int) -> None:
    num_ranks, flags = LAYOUTS[layout]
    chunking = ["--max-num-batched-tokens", str(budget)]
    with Launch("--model", str(STORIES), *flags, *chunking, num_ranks=num_ranks) as launch:
        url = launch.wait_ready()
        await check_rows(url, golden("stories260k_greedy"))
        await check_full_context(url, golden("stories260k_greedy")[0])


@pytest.mark.parametrize("budget", [16, pytest.param(2048, marks=pytest.mark.layouts)])
async def test_smollm2(budget: int) -> None:
    chunking = ["--max-num-batched-tokens", str(budget)]
    with Launch("--dtype", "float32", *chunking) as launch:
        await check_rows(launch.wait_ready(), golden("smollm2_greedy"))


async def check_rows(url: str, rows: list[dict[str, Any]]) -> None:
    """Twice: prompt logprobs do not come from the prefix cache that the first round filled. In
    CVE-2026-116180 positions that were cached had none, and what stood there ended the engine."""
    async with aiohttp.ClientSession(url) as session:
        for row in [*rows, *rows]:
            choice = await complete(session, row)
            assert choice["token_ids"] == row["token_ids"]
            check_prompt(choice["prompt_logprobs"], row)
            for got, wanted in zip(choice["logprobs"]["top_logprobs"], row["top5"], strict=True):
                assert sorted(got.values(), reverse=True) == pytest.approx(
                    [logprob for _, logprob in wanted], abs=TOLERANCE
                )


async def check_full_context(url: str, row: dict[str, Any]) -> None:
    """A prompt as long as the context, scored, begins like one that leaves room."""
    text = [*row["prompt_ids"], *row["token_ids"]]
    prompt = (text * 6)[:STORIES_CONTEXT]
    async with aiohttp.ClientSession(url) as session:
        described = []
        for part in (prompt, prompt[:-1]):
            body = {"prompt": part, "max_tokens": 0, "echo": True, "logprobs": 0}
            answer = await post(session, "/v1/completions", body)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 0
            described.append(choice["logprobs"]["token_logprobs"])
    assert [len(logprobs) for logprobs in described] == [STORIES_CONTEXT, STORIES_CONTEXT - 1]
    assert described[0][1:-1] == pytest.approx(described[1][1:], abs=TOLERANCE)
    assert described[0][len(row["prompt_ids"]) : len(text)] == pytest.approx(
        row["logprobs"], abs=TOLERANCE
    )


def check_prompt(described: list[dict[str, Any] | None], row: dict[str, Any]) -> None:
    assert described[0] is None
    pairs = zip(described, row["prompt_ids"], row["prompt_logprobs"], strict=True)
    for got, token_id, wanted in list(pairs)[1:]:
        assert got is not None
        own = got[str(token_id)]
        assert own["logprob"] == pytest.approx(wanted, abs=TOLERANCE)
        top = sorted(got.values(), key=lambda entry: entry["rank"])[:NUM_TOP]
        assert [entry["rank"] for entry in top] == list(range(1, NUM_TOP + 1))
        assert (own in top) == (own["rank"] <= NUM_TOP)
        logprobs = [entry["logprob"] for entry in sorted(got.values(), key=lambda e: e["rank"])]
        assert logprobs == sorted(logprobs, reverse=True)


async def complete(session: aiohttp.ClientSession, row: dict[str, Any]) -> dict[str, Any]:
    body = {
        "prompt": row["prompt_ids"],
        "max_tokens": len(row["token_ids"]),
        "temperature": 0,
        "logprobs": NUM_TOP,
        "prompt_logprobs": NUM_TOP,
        "return_token_ids": True,
    }
    answer = await post(session, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    choice: dict[str, Any] = answer["choices"][0]
    return choice
