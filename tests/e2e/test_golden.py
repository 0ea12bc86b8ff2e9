"""Greedy decoding over HTTP equals the float32 references, on every layout."""

from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from support.launching import SHARED, STORIES, Launch, golden, post

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values")

TIE_GAP = 1e-3
LOGPROB_TOLERANCE = 3e-4

LAYOUTS = {
    "one": (1, ()),
    "tp2": (2, ("-tp", "2")),
    "pp2": (2, ("-pp", "2")),
    "dp2": (2, ()),
    "tp2-pp2": (4, ("-tp", "2", "-pp", "2")),
}


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_stories(layout: str, scheduling: str) -> None:
    num_ranks, flags = LAYOUTS[layout]
    with Launch("--model", str(STORIES), *flags, scheduling, num_ranks=num_ranks) as launch:
        await check_rows(launch.wait_ready(), golden("stories260k_greedy"))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_smollm2(layout: str) -> None:
    num_ranks, flags = LAYOUTS[layout]
    with Launch("--dtype", "float32", *flags, num_ranks=num_ranks) as launch:
        await check_rows(launch.wait_ready(), golden("smollm2_greedy"))


@pytest.mark.parametrize("layout", ["one", "tp2"])
async def test_smollm2_bfloat16(layout: str) -> None:
    """Rounding may choose another token, but only one that the reference also held likely."""
    num_ranks, flags = LAYOUTS[layout]
    with Launch(*flags, num_ranks=num_ranks) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            for row in golden("smollm2_greedy"):
                choice = await complete(session, row)
                at = first_difference(choice["token_ids"], row["token_ids"])
                if at is not None:
                    top5 = [token_id for token_id, _ in row["top5"][at]]
                    assert choice["token_ids"][at] in top5


async def check_rows(url: str, rows: list[dict[str, Any]]) -> None:
    async with aiohttp.ClientSession(url) as session:
        for row in rows:
            choice = await complete(session, row)
            at = first_difference(choice["token_ids"], row["token_ids"])
            assert at is None or row["top2_gap"][at] < TIE_GAP, (row["prompt"], at)
            logprobs = choice["logprobs"]["token_logprobs"][:at]
            for got, wanted in zip(logprobs, row["logprobs"], strict=False):
                assert got == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)


async def complete(session: aiohttp.ClientSession, row: dict[str, Any]) -> dict[str, Any]:
    body = {
        "prompt": row["prompt_ids"],
        "max_tokens": len(row["token_ids"]),
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    answer = await post(session, "/v1/completions", body)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def first_difference(got: list[int], wanted: list[int]) -> int | None:
    pairs: Iterator[tuple[int, int]] = zip(got, wanted, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert at is not None or len(got) == len(wanted)
    return at
