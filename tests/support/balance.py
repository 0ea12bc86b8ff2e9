"""Many requests at once to one or several front ends, and which replica computed what."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from support.launching import post

CONCURRENCY = 32
BLOCK_SIZE = 16
"""The default."""


@asynccontextmanager
async def sessions(urls: Sequence[str]) -> AsyncIterator[list[aiohttp.ClientSession]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))
            )
            for url in urls
        ]


def prompt(chance: random.Random, num_tokens: int) -> list[int]:
    return [chance.randrange(3, 512) for _ in range(num_tokens)]


def distinct_prompts(count: int) -> list[list[int]]:
    chance = random.Random(1)
    return [prompt(chance, chance.randrange(4, 60)) for _ in range(count)]


def prompts_with_prefixes(num_prefixes: int, num_prefix_tokens: int, count: int) -> list[list[int]]:
    """Each begins with one of the prefixes, at random, and ends in its own way."""
    chance = random.Random(num_prefixes)
    shared = [prompt(chance, num_prefix_tokens) for _ in range(num_prefixes)]
    return [[*chance.choice(shared), *prompt(chance, 20)] for _ in range(count)]


def num_cached_on_one_replica(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that one replica would find, whose cache never overflows, if each prompt came when
    those before it are computed: the most that is possible in this order."""
    known: set[tuple[int, ...]] = set()
    num_found = 0
    for token_ids in prompts:
        for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            block = tuple(token_ids[:end])
            num_found += BLOCK_SIZE * (block in known and end < len(token_ids))
            known.add(block)
    return num_found


async def ask_all(
    front_ends: Sequence[aiohttp.ClientSession], prompts: Sequence[Sequence[int]]
) -> None:
    """CONCURRENCY clients, each with the next prompt as soon as it has an answer. Clients are
    dealt out to the front ends."""
    left: Iterator[tuple[int, Sequence[int]]] = iter(enumerate(prompts))
    lengths = random.Random(2)

    async def client(session: aiohttp.ClientSession) -> None:
        for index, token_ids in left:
            body = {
                "prompt": token_ids,
                "max_tokens": lengths.randrange(16, 48),
                "seed": index,
                "ignore_eos": True,
            }
            await post(session, "/v1/completions", body)

    async with asyncio.TaskGroup() as tasks:
        for number in range(CONCURRENCY):
            tasks.create_task(client(front_ends[number % len(front_ends)]))


async def by_engine(session: aiohttp.ClientSession, name: str) -> list[float]:
    """A figure of every replica, in their order, as one front end tells it; its other labels are
    added up."""
    async with session.get("/metrics") as response:
        text = await response.text()
    figures: dict[int, float] = {}
    for line in text.splitlines():
        if match := re.fullmatch(rf'aioengine:{name}\{{engine="(\d+)"[^}}]*\}} (\S+)', line):
            engine = int(match[1])
            figures[engine] = figures.get(engine, 0.0) + float(match[2])
    return [figures[engine] for engine in sorted(figures)]


async def num_answers(front_ends: Sequence[aiohttp.ClientSession]) -> list[float]:
    """Of every replica; each front end counts its own."""
    counts = [await by_engine(session, "request_success_total") for session in front_ends]
    return [sum(of_replica) for of_replica in zip(*counts, strict=True)]


def minus(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(after, before, strict=True)]


async def complete(session: aiohttp.ClientSession, **body: Any) -> dict[str, Any]:
    return await post(session, "/v1/completions", {"ignore_eos": True, **body})
