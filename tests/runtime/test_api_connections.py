"""Connections: what is no HTTP, what is too large or too slow, and how much of it there may be."""

import asyncio
import contextlib
import gzip
import io
import json
import logging
import math
import socket

import pytest
from support.http_server import COMPLETIONS, PROMPT, serving
from support.mailbox import settle
from support.raw_http import ask, connected, head, read_answer
from support.tiny_model import ids

from aioengine.api import bodies, connection
from aioengine.limits import MAX_BODY_BYTES, MAX_HEAD_BYTES

OPENING = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
NUM_STEPS = 10_000
NO_HTTP = {
    "TLS": bytes.fromhex("16030100d2010000ce0303") + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version": b"GET /livez HTTP/9.9\r\nHost: x\r\n\r\n",
    "method": b"STEAL /livez HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "no target": b"GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    "port": b"GET http://x:99999/livez HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in target": b"GET /liv\0ez HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in target": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in header": b"GET /livez HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
    "folded header": b"GET /livez HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "line feeds": b"GET /livez HTTP/1.1\nHost: x\n\n",
    "two lengths": OPENING + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "length and chunks": OPENING
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /",
    "negative length": OPENING + b"Content-Length: -1\r\n\r\n",
    "endless length": OPENING + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "chunk size": OPENING + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "chunk end": OPENING + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX\r\n",
    "coding": OPENING + b"Transfer-Encoding: gzip\r\n\r\nabc",
}


def no_trouble(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.levelno > logging.INFO]


# --- what is no HTTP -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NO_HTTP)
async def test_what_is_no_http_gets_400_and_no_traceback(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        for opening in (b"", head("GET", "/livez")):  # at the beginning, or behind a request
            async with connected(server.url) as (reader, writer):
                if opening:
                    writer.write(opening)
                    assert (await read_answer(reader))[0] == 200
                writer.write(NO_HTTP[name])
                status, _, body = await read_answer(reader)
                assert status == 400
                assert await reader.read() == b""
            assert body.startswith(b'{"error":{"message":"this is no valid HTTP: ')
        assert (await server.get("/livez")).status == 200
    assert no_trouble(caplog), caplog.text


@pytest.mark.parametrize("rest", [b"zz\r\n", b"5\r\nhelloXX\r\n", b"\0\0"])
async def test_a_body_that_breaks_off_in_the_middle(
    rest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server, connected(server.url) as (reader, writer):
        writer.write(head("POST", COMPLETIONS, Transfer_Encoding="chunked") + b"2\r\n{}\r\n")
        await settle()
        writer.write(rest)
        status, _, body = await read_answer(reader)
        assert (status, b"framing is broken" in body) == (400, True)
        await reader.read()
        assert (await server.get("/livez")).status == 200
    assert no_trouble(caplog), caplog.text


async def test_what_is_no_http_behind_a_request_does_not_end_it() -> None:
    body = b'{"prompt": "hello", "stream": true}'
    async with serving() as server, connected(server.url) as (reader, writer):
        writer.write(head("POST", COMPLETIONS, Content_Length=len(body)) + body)
        (added,) = await server.leader.added()
        writer.write(b"\0\0\r\n\r\n")
        await settle()
        server.leader.answer(added, ids("hi"), "length")
        answers = await reader.read()
        assert b'"text":"hi"' in answers
        assert b"[DONE]" in answers
        assert answers.count(b"HTTP/1.") == 2
        assert b"no valid HTTP" in answers


async def test_expectations_upgrades_and_encodings_that_are_not_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        length = b"Content-Length: 2\r\n\r\n{}"
        for request, expected in (
            (OPENING + b"Expect: tea\r\n" + length, 417),
            (OPENING + b"Content-Encoding: br\r\n" + length, 400),
            (OPENING + b"Content-Encoding: gzip\r\n" + length, 400),
            (head("POST", "/nowhere", Content_Encoding="gzip", Content_Length=2) + b"{}", 404),
            (head("GET", "/livez", Connection="Upgrade", Upgrade="websocket") + b"xx", 200),
            (head("GET", "/livez", Connection="Upgrade", Upgrade="h2c"), 200),
            (head("CONNECT", "x:443"), 404),
            (head("OPTIONS", "*"), 404),
        ):
            assert (await ask(server.url, request))[0] == expected, request
    assert no_trouble(caplog), caplog.text


# --- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (head("GET", "/" + "a" * 9000), 414),
        (head("GET", "/livez", a="a" * 17_000), 431),
        (head("GET", "/livez", **{"a" * 17_000: "b"}), 431),
        (head("GET", "/livez", **{f"h{i}": "a" for i in range(200)}), 431),
        (head("GET", "/livez", **{f"h{i}": "a" * 600 for i in range(100)}), 200),
    ],
    ids=["target", "header", "name", "number", "within"],
)
async def test_headers_that_are_too_large(
    request_: bytes, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """CVE-2025-48956."""
    async with serving() as server:
        status, _, body = await ask(server.url, request_)
        assert status == expected
        assert expected == 200 or b'"type":"invalid_request_error"' in body
    assert no_trouble(caplog), caplog.text


@pytest.mark.parametrize("opening", [b"", head("GET", "/livez")], ids=["first", "later"])
async def test_headers_that_never_end(opening: bytes) -> None:
    """CVE-2025-48956: a header without end exhausted the server's memory.

    Each of these is within its limit, all together are beyond.
    """
    async with serving() as server, connected(server.url) as (reader, writer):
        if opening:
            writer.write(opening)
            await read_answer(reader)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        for number in range(MAX_HEAD_BYTES // 8000 + 1):
            writer.write(b"h%d: %b\r\n" % (number, b"a" * 8000))
        status, headers, body = await read_answer(reader)
        assert (status, headers["connection"]) == (431, "close")
        assert b"65536" in body
        assert (await server.get("/livez")).status == 200


# --- bodies --------------------------------------------------------------------------------------


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async with serving() as server:
        request = head("POST", COMPLETIONS, Content_Length=10**12)
        assert (await ask(server.url, request))[0] == 413


async def test_a_body_in_chunks_is_cut_off_at_the_limit() -> None:
    async with serving() as server, connected(server.url) as (reader, writer):
        writer.write(head("POST", COMPLETIONS, Transfer_Encoding="chunked"))
        chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            writer.write(chunk)
        assert (await read_answer(reader))[0] == 413


async def test_a_body_that_inflates() -> None:
    """40 MB of it in 40 kB."""
    bomb = gzip.compress(bytes(40 * 2**20))
    async with serving() as server:
        answer = await server.ask(
            "POST", COMPLETIONS, data=io.BytesIO(bomb), headers={"Content-Encoding": "gzip"}
        )
        assert answer.status == 413
        assert answer.error


async def test_a_body_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_SECONDS", 0.1)
    async with serving() as server:
        request = head("POST", COMPLETIONS, Content_Length=100) + b"{"
        status, _, body = await ask(server.url, request)
        assert status == 408
        assert b"within 0.1 s" in body


async def test_bodies_that_are_too_much_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What some clients announce and do not send counts; it is free again when they leave."""
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 2 * MAX_BODY_BYTES)
    async with serving() as server:
        request = head("POST", COMPLETIONS, Content_Length=MAX_BODY_BYTES) + b"{"
        async with connected(server.url) as first, connected(server.url) as second:
            for _, writer in (first, second):
                writer.write(request)
            await settle()
            answer = await server.post(COMPLETIONS, PROMPT)
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
            assert answer.headers["Retry-After"]
            assert (await server.get("/v1/models")).status == 200
        await settle()
        assert (await server.post(COMPLETIONS, {})).status == 400


async def test_a_full_server_reads_no_prompts() -> None:
    async with serving(max_concurrent_requests=1) as server, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(server.post(COMPLETIONS, PROMPT))
        await server.leader.added()
        answer = await server.post(COMPLETIONS, b"{")
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert answer.headers["Retry-After"]
        await server.play("a")
        assert (await asked).status == 200


# --- slow and idle clients -----------------------------------------------------------------------


async def test_more_connections_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(connection.Connection, "_warned_at_s", -math.inf)
    async with serving() as server:
        assert (await server.get("/livez")).status == 200  # the session keeps its connection
        async with connected(server.url), connected(server.url):
            for _ in range(3):
                async with connected(server.url) as (reader, _):
                    assert await reader.read() == b""
            assert (await server.get("/livez")).status == 200
    assert caplog.text.count("connections are refused: 3 are open") == 1


async def test_idle_connections_are_in_nobodys_way() -> None:
    """The sockets of both sides are this process's, so their number is what it may have."""
    async with serving() as server, contextlib.AsyncExitStack() as stack:
        for number in range(200):
            _, writer = await stack.enter_async_context(connected(server.url))
            if number % 2:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(server.post(COMPLETIONS, PROMPT))
            await server.play("hi")
        assert asked.result().status == 200


async def test_little_waits_in_the_kernel_for_a_slow_reader() -> None:
    """Events that it cannot take merge, in the front end."""
    async with serving() as server, connected(server.url, 4096) as (reader, writer):
        body = b'{"prompt": "hello", "stream": true, "max_tokens": 100, "return_token_ids": true}'
        writer.write(head("POST", COMPLETIONS, Content_Length=len(body)) + body)
        (added,) = await server.leader.added()
        for number in range(NUM_STEPS):
            server.leader.answer(added, (97 + number % 26,))
            if number % 20 == 0:
                await asyncio.sleep(0)
        server.leader.answer(added, (), "length")
        data = bytearray()
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += await reader.read(2**16)
        lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
        events = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
        token_ids = [token_id for event in events for token_id in event["token_ids"]]
        assert token_ids == [97 + number % 26 for number in range(NUM_STEPS)]
        assert len(events) < NUM_STEPS // 2


async def test_a_reader_that_stopped_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, whose probes tell a slow client from one that reads nothing."""
    monkeypatch.setattr(connection, "MAX_STALL_SECONDS", 1)
    async with serving() as server, connected(server.url, 4096) as (_, writer):
        sock = writer.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < 16_384
        body = b'{"prompt": "hello", "stream": true, "max_tokens": 100}'
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's can
        writer.write(head("POST", COMPLETIONS, Content_Length=len(body)) + body)
        (added,) = await server.leader.added()
        for _ in range(20_000):
            server.leader.answer(added, ids("a" * 50))
        assert await server.leader.aborted() == [added.request_id]
        assert server.front_end.num_live == 0
