"""Compare what a server generates with the shared float32 references."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from support.launching import post

TIE_GAP = 1e-3
LOGPROB_TOLERANCE = 3e-4


async def check_rows(url: str, rows: list[dict[str, Any]]) -> None:
    """Every row at the same time: tokens equal but for ties, logprobs within the tolerance."""
    async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as tasks:
        for row in rows:
            tasks.create_task(check_row(session, row))


async def check_row(session: aiohttp.ClientSession, row: dict[str, Any]) -> None:
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
