"""Ways in which other servers of models were broken, continued: what clients write into metrics."""

import asyncio
import itertools
from typing import Any

import pytest
from support.exposition import samples
from support.fake_leaders import FakeLeader
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, Served, serving
from support.raw_http import ask, connected, head
from support.tiny_model import ids

PATHS = (
    "/v1/models/another",
    "/v1/models/another/still",
    '/%22,x=%22y"',
    "/%0a%23",
    "/v1/engines/davinci/completions",
    "//metrics",
    "/metrics/",
    "/livez?state=x",
)
METHODS = ("BREW", "PROPFIND", "OPTIONS", "DELETE", "X" * 64, "get")
HEADERS = {
    "User_Agent": "scraper/1.0",
    "Origin": "https://elsewhere.example",
    "Authorization": "Bearer stolen",
    "X_Request_Id": "id-of-the-client",
    "X_data_parallel_rank": "77777",
    "X_Forwarded_For": "203.0.113.9",
    "OpenAI_Organization": "org",
}
NO_HTTP = (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\xff \xff\r\n\r\n")
FIELDS: tuple[dict[str, Any], ...] = (
    {"model": 'x"} 1\nmine 1'},
    {"user": "somebody"},
    {"metadata": {"customer": "a"}},
    {"cache_salt": "of one client"},
    {"response_format": {"type": "mine"}},
    {"priority": -77777},
    {"a new field": 1},
    {"n": 3},
    {"stop": "ab"},
    {"max_tokens": 0, "echo": True},
)


@pytest.mark.parametrize("settings", [{}, {"api_key": ("key",), "root_path": "/llm"}])
async def test_nothing_that_a_client_sends_becomes_a_series(settings: dict[str, Any]) -> None:
    """Metric-label growth: a series for every path, method, model, user or id that anybody made up
    fills the memory of the server and of everybody who scrapes it, and may carry text into both."""
    root = settings.get("root_path", "")
    async with serving(states=("ready", "failed"), **settings) as server:
        before = samples((await server.get(f"{root}/metrics")).text)
        for path in PATHS:
            await ask(server.url, head("GET", path))
            await ask(server.url, head("GET", root + path))
        for method in METHODS:
            async with connected(server.url) as (reader, writer):
                writer.write(head(method, f"{root}/v1/models"))
                assert await reader.readline()
        for name, value in HEADERS.items():
            await ask(server.url, head("GET", f"{root}/version", **{name: value}))
        for data in NO_HTTP:
            async with connected(server.url) as (reader, writer):
                writer.write(data)
                assert await reader.readline()
        await ask_with_all_fields(server, root)
        after = samples((await server.get(f"{root}/metrics")).text)
    assert before.keys() == after.keys()
    num_counted = sum(after.values()) - sum(before.values())
    assert num_counted > len(PATHS), "what was sent was not even counted"


async def ask_with_all_fields(server: Served, root: str) -> None:
    headers = {"Authorization": "Bearer key"}
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(answer_all(server.leader))
        for path, body in ((COMPLETIONS, PROMPT), (CHAT, MESSAGES)):
            for fields in FIELDS:
                answer = await server.post(root + path, {**body, **fields}, headers=headers)
                assert answer.status in (200, 400, 404), fields
        answering.cancel()


async def answer_all(leader: FakeLeader) -> None:
    for number in itertools.count():
        added = (await leader.added(number + 1))[number]
        leader.answer(added, ids("x"), "length")
