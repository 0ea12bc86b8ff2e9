"""Advisories in which one request's parameters ended the engine, or reached its neighbours:
CVE-2026-54235 (temperatures), CVE-2026-105922 (penalties), CVE-2026-116172 and CVE-2026-116181 (log
probabilities, ids to stop at), CVE-2026-105756 (salts), CVE-2026-114051 (min_tokens).

Everything here is allowed. So each request is answered, on one rank and through a pipeline, while
known requests run beside it, and they get their own tokens.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from support.golden_rows import check_rows
from support.launching import STORIES, Launch, golden, post, stream

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

VOCAB_SIZE = 512
CONTEXT = 512
MAX_TOKENS = 4
BATCH = 24
EVERY_ID = [str(token_id) for token_id in range(VOCAB_SIZE)]
ODD_TEXT = (
    "\x00\ufffe\U0010ffff\u202e👨\u200d👩\u200d👧 z" + "\u0301" * 60 + "</s><s><unk>\r\n\u2028"
)
EDGES: dict[str, list[Any]] = {
    "prompt": [[1], [VOCAB_SIZE - 1], [2, 2, 0], [7] * (CONTEXT - MAX_TOKENS), ODD_TEXT, ""],
    "max_tokens": [1, MAX_TOKENS],
    "min_tokens": [0, "max_tokens"],
    "temperature": [0, 5e-324, 1e-38, 1e-5, 3.4e38, 3.5e38, 1.7e308],
    "top_p": [5e-324, 1e-9, 1],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0, 5e-324, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.01, 100],
    "logit_bias": [
        dict.fromkeys(EVERY_ID, -100),
        dict.fromkeys(EVERY_ID, 100),
        {**dict.fromkeys(EVERY_ID, -100), EVERY_ID[-1]: 100},
        {},
    ],
    "seed": [-(2**63), -1, 0, 2**63 - 1],
    "stop": [
        ["a" * length for length in range(1, 17)],
        [chr(0x1F600 + i) * 1024 for i in range(16)],
        ["\x00", "\ufffd", " ", "\n"],
    ],
    "stop_token_ids": [list(range(256)), list(range(256, 512)), [2] * 256, []],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "echo": [True],
    "n": [1, 3],
    "priority": [-(2**31), 2**31 - 1],
    "cache_salt": ["", "\x00", "🙂" * 256],
    "return_token_ids": [True],
    "stream": [True],
}
LARGEST: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "n": 128, "max_tokens": 3, "logprobs": 20},
    {"prompt": [[1]] * 1024, "max_tokens": 1},
    {"prompt": [1, 403], "max_tokens": CONTEXT - 2, "min_tokens": CONTEXT - 2, "logprobs": 20},
    {"prompt": [[7] * CONTEXT] * 8, "max_tokens": 0, "echo": True, "logprobs": 20},
    {"prompt": [9] * CONTEXT, "max_tokens": 0, "prompt_logprobs": 20, "n": 8},
    {"prompt": [5] * (CONTEXT - 1), "temperature": 1e-38, "presence_penalty": 2},
]


@pytest.fixture(scope="module", params=["one", "pp2"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    flags, num_ranks = {"one": ((), 1), "pp2": (("-pp", "2"), 2)}[request.param]
    most = ("--max-concurrent-requests", "4096")
    with Launch("--model", str(STORIES), *flags, *most, num_ranks=num_ranks) as launch:
        yield launch.wait_ready()
        assert "raceback" not in launch.log


async def test_each_edge_meets_each_other(url: str) -> None:
    bodies = bodies_with_all_pairs(random.Random(11))
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        for start in range(0, len(bodies), BATCH):
            await attack(session, url, bodies[start : start + BATCH])


async def test_each_edge_alone_and_the_largest_requests(url: str) -> None:
    bodies = [
        resolved({"prompt": [1, 403, 407], "max_tokens": MAX_TOKENS, name: edge})
        for name, edges in EDGES.items()
        for edge in edges
    ]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        for start in range(0, len(bodies), BATCH):
            await attack(session, url, bodies[start : start + BATCH])
        for body in LARGEST:
            await attack(session, url, [body])


async def attack(session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]]) -> None:
    """All at once, beside known requests; afterwards the server is as well as before."""
    async with asyncio.TaskGroup() as tasks:
        for body in bodies:
            tasks.create_task(check_served(session, body))
        tasks.create_task(check_rows(url, golden("stories260k_greedy")))
    async with session.get("/health") as response:
        assert (response.status, (await response.json())["status"]) == (200, "ok")


async def check_served(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    if body.get("stream"):
        parts = [
            part
            for event in await stream(session, "/v1/completions", body)
            for part in event["choices"]
        ]
    else:
        parts = (await post(session, "/v1/completions", body))["choices"]
    prompt = body["prompt"]
    num_prompts = len(prompt) if prompt and isinstance(prompt[0], list) else 1
    ended = [part for part in parts if part["finish_reason"] is not None]
    assert len(ended) == num_prompts * body.get("n", 1), body
    assert {part["finish_reason"] for part in ended} <= {"stop", "length"}
    for part in parts:
        assert all(0 <= token_id < VOCAB_SIZE for token_id in part.get("token_ids") or [])
        described = (part["logprobs"] or {}).get("token_logprobs", [])
        assert all(p is None or (math.isfinite(p) and p <= 0) for p in described), body


def bodies_with_all_pairs(chance: random.Random) -> list[dict[str, Any]]:
    """Random ones with about half of the fields, until any two edges of two fields have met."""
    missing = {
        frozenset([(first, i), (second, j)])
        for first, second in itertools.combinations(EDGES, 2)
        for i in range(len(EDGES[first]))
        for j in range(len(EDGES[second]))
        if {first, second} != {"prompt_logprobs", "stream"}
    }
    bodies = []
    while missing:
        names = {"prompt", "max_tokens", *chance.sample(sorted(EDGES), len(EDGES) // 2)}
        if {"prompt_logprobs", "stream"} <= names:  # they exclude each other
            names.remove(chance.choice(["prompt_logprobs", "stream"]))
        chosen = {name: chance.randrange(len(EDGES[name])) for name in sorted(names)}
        pairs = {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        if missing & pairs:
            missing -= pairs
            bodies.append(resolved({name: EDGES[name][i] for name, i in chosen.items()}))
    return bodies


def resolved(body: dict[str, Any]) -> dict[str, Any]:
    """`min_tokens` may be as many as `max_tokens`."""
    if body.get("min_tokens") == "max_tokens":
        return {**body, "min_tokens": body["max_tokens"]}
    return body
