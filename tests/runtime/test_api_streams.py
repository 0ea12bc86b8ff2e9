"""Server-sent events of both routes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, Answer, Served, serving
from support.mailbox import settle
from support.tiny_model import MODEL_NAME, ids

CHAT_PROMPT = "<user>hello\n<assistant>"
BODIES = {COMPLETIONS: PROMPT, CHAT: MESSAGES}


async def streamed(
    server: Served, path: str, fields: dict[str, Any], *texts: str, count: int = 1
) -> Answer:
    async with asyncio.TaskGroup() as tasks:
        body = {**BODIES[path], "stream": True, **fields}
        answer = tasks.create_task(server.post(path, body))
        await server.play(*texts, count=count)
    assert answer.result().status == 200, answer.result().text
    return answer.result()


def choices(events: list[Any]) -> list[Any]:
    return [choice for event in events for choice in event["choices"]]


async def test_a_chat_stream() -> None:
    async with serving() as server:
        answer = await streamed(server, CHAT, {}, "he", "llo")
        assert answer.headers["Cache-Control"] == "no-cache"
        first, *rest = answer.events
        assert first["choices"] == [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
            }
        ]
        heads = [{k: v for k, v in event.items() if k != "choices"} for event in answer.events]
        assert all(head == heads[0] for head in heads)
        assert (heads[0]["object"], heads[0]["model"]) == ("chat.completion.chunk", MODEL_NAME)
        assert "".join(c["delta"].get("content", "") for c in choices(rest)) == "hello"
        reasons = [choice["finish_reason"] for choice in choices(rest)]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) <= {None}
        assert not any("role" in choice["delta"] for choice in choices(rest))


async def test_a_completion_stream() -> None:
    async with serving() as server:
        events = (await streamed(server, COMPLETIONS, {}, "he", "llo")).events
        assert "".join(choice["text"] for choice in choices(events)) == "hello"
        assert choices(events)[-1]["finish_reason"] == "length"
        assert {event["object"] for event in events} == {"text_completion"}
        assert not any("usage" in event for event in events)


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, "hello"), (CHAT, CHAT_PROMPT)])
async def test_usage_comes_last(path: str, prompt: str) -> None:
    fields = {"n": 2, "stream_options": {"include_usage": True}}
    async with serving() as server:
        *events, last = (await streamed(server, path, fields, "ab", "c", count=2)).events
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens"] == len(prompt)
        assert last["usage"]["completion_tokens"] == 6
        assert all(event["usage"] is None for event in events)


@pytest.mark.parametrize("path", BODIES)
async def test_usage_with_every_chunk(path: str) -> None:
    fields = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with serving() as server:
        *events, _ = (await streamed(server, path, fields, "ab", "c")).events
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 3


@pytest.mark.parametrize("path", BODIES)
async def test_choices_are_told_apart(path: str) -> None:
    async with serving() as server:
        events = (await streamed(server, path, {"n": 3}, "ab", "c", count=3)).events
        texts = {0: "", 1: "", 2: ""}
        for choice in choices(events):
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            texts[choice["index"]] += text
        assert set(texts.values()) == {"abc"}
        ends = [c["index"] for c in choices(events) if c["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("path", BODIES)
async def test_token_ids_and_log_probabilities(path: str) -> None:
    logprobs: dict[str, Any] = {"logprobs": 1}
    if path == CHAT:
        logprobs = {"logprobs": True, "top_logprobs": 1}
    fields = {"return_token_ids": True, **logprobs}
    async with serving() as server:
        events = (await streamed(server, path, fields, "h", "é", ".")).events
        prompt = CHAT_PROMPT if path == CHAT else "hello"
        assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [
            list(ids(prompt))
        ]
        assert "prompt_token_ids" in events[0]
        token_ids = [t for choice in choices(events) for t in choice.get("token_ids", [])]
        assert token_ids == list(ids("hé."))
        parts = [choice["logprobs"] for choice in choices(events) if choice["logprobs"]]
        if path == CHAT:
            tokens = [entry["token"] for part in parts for entry in part["content"]]
        else:
            tokens = [token for part in parts for token in part["tokens"]]
            assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 1, 2]
        assert tokens == ["h", "\ufffd", "\ufffd", "."]


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_sent_while_there_is_no_text(path: str) -> None:
    """Half a character, or what may become a stop string."""
    async with serving() as server, asyncio.TaskGroup() as tasks:
        body = {**BODIES[path], "stream": True, "stop": "END"}
        asked = tasks.create_task(server.post(path, body))
        (added,) = await server.leader.added()
        for token_id in (*ids("é"), *ids("EN"), *ids("d")):
            server.leader.answer(added, (token_id,))
            await settle()
        server.leader.answer(added, (), "length")
        events = (await asked).events
        key = (lambda c: c["delta"].get("content")) if path == CHAT else (lambda c: c["text"])
        texts = [key(choice) for choice in choices(events)]
        assert "".join(text for text in texts if text) == "éENd"
        assert len([text for text in texts if text]) <= 2


# --- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("ending", ["error of the request", "failure of the replica", "end"])
async def test_a_failure_is_one_error_event_then_done(path: str, ending: str) -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        body = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
        asked = tasks.create_task(server.post(path, {**body, "n": 2}))
        first, second = await server.leader.added(2)
        server.leader.answer(first, ids("x"))
        match ending:
            case "error of the request":
                server.leader.answer(second, (), "error", error="the cause")
            case "failure of the replica":
                server.leader.fail("the cause")
            case "end":
                await settle()
                server.front_end.end_streams("the cause")
        answer = await asked
        assert answer.status == 200
        *events, last = answer.events
        assert last["error"]["message"] == "the cause"
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert not any("error" in event for event in events)
        assert not any(choice["finish_reason"] for choice in choices(events))
        assert server.front_end.num_live == 0


async def test_an_error_before_the_stream_has_begun_is_no_stream() -> None:
    async with serving() as server:
        answer = await server.post(COMPLETIONS, {**PROMPT, "stream": True, "n": 0})
        assert (answer.status, answer.error["param"]) == (400, "n")


async def lines(response: Any) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.strip():
            yield line


@pytest.mark.parametrize("path", BODIES)
async def test_chunks_arrive_as_they_come(path: str) -> None:
    async with serving() as server:
        body = {**BODIES[path], "stream": True}
        async with server.session.post(path, json=body) as response:
            received = lines(response)
            (added,) = await server.leader.added()
            if path == CHAT:
                assert b'"assistant"' in await anext(received)
            for text in ("one", "two"):
                server.leader.answer(added, ids(text))
                assert text.encode() in await anext(received)
            server.leader.answer(added, (), "length")
            assert b'"finish_reason":"length"' in await anext(received)
            assert await anext(received) == b"data: [DONE]\n"


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_a_stream_aborts_its_requests(path: str) -> None:
    async with serving() as server:
        body = {**BODIES[path], "stream": True, "n": 2}
        async with server.session.post(path, json=body) as response:
            first, second = await server.leader.added(2)
            server.leader.answer(first, ids("x"))
            await anext(lines(response))
            response.close()
        assert set(await server.leader.aborted(2)) == {first.request_id, second.request_id}
        assert server.front_end.num_live == 0


@pytest.mark.parametrize("path", BODIES)
async def test_text_arrives_as_it_was_written(path: str) -> None:
    """Events between the first and the last are made from a template."""
    texts = ["plain ", '"quoted" \\ ', "\n\ndata: x\n\n", "é日😀", "\0\x1f\u2028", "end"]
    async with serving() as server:
        events = (await streamed(server, path, {}, *texts)).events
        found = [
            c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices(events)
        ]
        assert "".join(found) == "".join(texts)
        shapes = {tuple(choice) for choice in choices(events)[1:]}
        assert len(shapes) == 1  # all have the same fields
        assert {event["id"] for event in events} == {events[0]["id"]}


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "hello", "stream": true}'
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = tasks.create_task(reader.read())
        await server.play("he", "llo")
        head, _, events = (await answer).decode().partition("\r\n\r\n")
        writer.close()
        assert "transfer-encoding" not in head.lower()
        assert all(line.startswith("data: ") for line in events.split("\n\n")[:-1])
        assert events.endswith("data: [DONE]\n\n")
