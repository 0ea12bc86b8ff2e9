"""Clients that read slowly or ask for nothing, beside others that must not notice."""

import asyncio
import contextlib
import json
import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.launching import STORIES, Launch, post, rank_pids, stream
from support.raw_http import connected, head

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_OTHERS = 63
NUM_IDLE = 1000
LEAST_EVENTS_BYTES = 8 * 2**20
LONG_NAME = "stories" * 150
"""Stands in every event, so that few tokens make many bytes."""
KV_BYTES = 24 * 2**20
"""Hardly more than the load needs, so that it is all touched before memory is measured."""
FLAGS = ("--model", str(STORIES), "--served-model-name", LONG_NAME)
FLAGS += ("--kv-cache-memory-bytes", str(KV_BYTES))
MANY = {"prompt": [1], "n": 24, "max_tokens": 480, "seed": 5, "ignore_eos": True}
OTHERS = [
    {"prompt": [1, 403, 407 + number % 8], "max_tokens": 100, "temperature": 0}
    for number in range(NUM_OTHERS)
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Launch(*FLAGS) as launch:
        yield launch.wait_ready()


@pytest.fixture
async def session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        yield session


async def test_a_slow_reader_among_63_others(url: str, session: aiohttp.ClientSession) -> None:
    """SO_RCVBUF of 4 KiB, some bytes a second, of over 8 MiB. Memory does not grow by the events
    that it does not read, the others get what they get alone, and so does it in the end."""
    (pid,) = (await rank_pids(session)).values()
    alone = [await stream(session, "/v1/completions", body) for body in OTHERS[:8]]
    for _ in range(2):  # the same load, so that what it needs is there
        async with asyncio.TaskGroup() as tasks:
            for body in OTHERS:
                tasks.create_task(stream(session, "/v1/completions", body))
            expected = await stream(session, "/v1/completions", MANY)
    assert sum(len(json.dumps(event)) for event in expected) > LEAST_EVENTS_BYTES
    before = rss_bytes(pid)
    payload = json.dumps({**MANY, "stream": True}).encode()
    async with connected(url, receive_buffer_bytes=4096) as (reader, writer):
        writer.write(head("POST", "/v1/completions", Content_Length=len(payload)) + payload)
        data = bytearray(await reader.read(100))
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(stream(session, "/v1/completions", other)) for other in OTHERS
            ]
            while not all(task.done() for task in streams):
                data += await reader.read(16)
                await asyncio.sleep(0.05)
        for number, task in enumerate(streams):
            assert text_of(task.result()) == text_of(alone[number % 8])
        await all_computed(session)
        assert rss_bytes(pid) - before < LEAST_EVENTS_BYTES / 2
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += await reader.read(2**16)
    assert len(data) < LEAST_EVENTS_BYTES / 2
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert text_of([json.loads(line.removeprefix(b"data: ")) for line in lines]) == text_of(
        expected
    )


async def test_a_thousand_idle_connections(url: str, session: aiohttp.ClientSession) -> None:
    """Half of them have begun a request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (pid,) = (await rank_pids(session)).values()
    before = rss_bytes(pid)
    expected = await post(session, "/v1/completions", OTHERS[0])
    try:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(NUM_IDLE):
                _, writer = await stack.enter_async_context(connected(url))
                if number % 2:
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            for _ in range(5):
                found = await post(session, "/v1/completions", OTHERS[0])
                assert found["choices"] == expected["choices"]
            assert len(os.listdir(f"/proc/{pid}/fd")) > NUM_IDLE
            assert rss_bytes(pid) - before < NUM_IDLE * 20 * 2**10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def rss_bytes(pid: int) -> int:
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    ]
    return int(line.split()[1]) * 2**10


def text_of(events: list[dict[str, Any]]) -> list[str]:
    """Of each choice of a stream."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


async def all_computed(session: aiohttp.ClientSession) -> None:
    while True:
        async with session.get("/server_info") as response:
            (replica,) = (await response.json())["replicas"]
        if not replica["num_requests_running"] + replica["num_requests_waiting"]:
            return
        await asyncio.sleep(0.1)
