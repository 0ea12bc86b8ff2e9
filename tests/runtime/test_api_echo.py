"""`echo`: answers that begin with their prompt, and what harnesses score with."""

import asyncio
from typing import Any

import pytest
from support.http_server import COMPLETIONS, Served, serving
from support.tiny_model import BOS_ID, ids

from aioengine import limits
from aioengine.messages import AddRequest, RequestDelta, TokenLogprobs

CONTEXT = 200


def describe_prompt(server: Served, added: AddRequest) -> None:
    """In two deltas, as chunks of a prefill bring them."""
    items = tuple(
        TokenLogprobs(-float(position), ((ord("z"), -0.25),), 7)
        for position in range(1, len(added.token_ids))
    )
    for part in (items[:2], items[2:]):
        server.leader.report(RequestDelta(added.request_id, (), prompt_logprobs=part))


async def scored(body: dict[str, Any], *texts: str, count: int = 1) -> Any:
    """The answer to a body that asks for log probabilities of its prompts; a stream's events."""
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(server.post(COMPLETIONS, body))
        for added in await server.leader.added(count):
            if added.params.prompt_logprobs is not None:
                describe_prompt(server, added)
        await server.play(*texts, count=count)
        answer = await asked
    assert answer.status == 200, answer.text
    return answer.events if body.get("stream") else answer.json


@pytest.mark.parametrize("prompt", ["hello", list(ids("hello")), [BOS_ID, *ids("hello")]])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_begins_with_the_prompt(prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "echo": True, "n": 2, "stream": stream}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(server.post(COMPLETIONS, body))
        added = await server.play(" wor", "ld", count=2)
        answer = await asked
    assert added[0].params.prompt_logprobs is None
    texts = {0: "", 1: ""}
    for event in answer.events if stream else [answer.json]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "hello world", 1: "hello world"}


async def test_special_tokens_are_echoed_where_they_are_shown() -> None:
    body = {"prompt": [BOS_ID, *ids("a")], "echo": True, "skip_special_tokens": False}
    assert (await scored(body, "b"))["choices"][0]["text"] == "<s>ab"


@pytest.mark.parametrize(("max_tokens", "output"), [(0, ""), (1, "o")])
async def test_a_scored_prompt(max_tokens: int, output: str) -> None:
    body = {"prompt": "hell", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = await scored(body, "o")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hell" + output, "length")
    assert choice["logprobs"] == {
        "tokens": list("hell" + output),
        "token_logprobs": [None, -1.0, -2.0, -3.0, *[-0.5] * len(output)],
        "top_logprobs": [
            None,
            {"e": -1.0, "z": -0.25},
            {"l": -2.0, "z": -0.25},
            {"l": -3.0, "z": -0.25},
            *[{"o": -0.5, "a": -1.0}] * len(output),
        ],
        "text_offset": list(range(4 + len(output))),
    }
    assert answer["usage"]["completion_tokens"] == len(output)
    assert answer["usage"]["prompt_tokens"] == 4


async def test_every_choice_of_a_stream_begins_with_its_own_scores() -> None:
    body = {
        "prompt": ["ab", "cde"],
        "echo": True,
        "logprobs": 0,
        "n": 2,
        "stream": True,
        "max_tokens": 2,
    }
    parts: dict[int, list[Any]] = {index: [] for index in range(4)}
    for event in await scored(body, "x", "y", count=4):
        for choice in event["choices"]:
            parts[choice["index"]].append(choice)
    for index, prompt in enumerate(["ab", "ab", "cde", "cde"]):
        first, *rest = parts[index]
        whole = [token for part in parts[index] for token in part["logprobs"]["tokens"]]
        assert whole == list(prompt + "xy")
        assert first["logprobs"]["token_logprobs"][0] is None
        assert None not in [p for part in rest for p in part["logprobs"]["token_logprobs"]]
        offsets = [offset for part in parts[index] for offset in part["logprobs"]["text_offset"]]
        assert offsets == list(range(len(prompt) + 2))


async def test_tokens_that_are_not_shown_take_no_room() -> None:
    body = {"prompt": [BOS_ID, *ids("é")], "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = (await scored(body, "x"))["choices"]
    assert choice["logprobs"]["tokens"] == ["<s>", "\ufffd", "\ufffd", "x"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1]
    assert choice["text"] == "éx"


async def test_prompt_logprobs_beside_an_echo_have_their_own_number() -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "prompt_logprobs": 1, "max_tokens": 0}
    (choice,) = (await scored(body, "x"))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}, {"c": -2.0}]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [2, 2]


async def test_a_prompt_alone() -> None:
    body = {"prompt": "abc", "prompt_logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    (choice,) = (await scored(body, "x"))["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "length")
    assert choice["prompt_token_ids"] == list(ids("abc"))
    assert len(choice["prompt_logprobs"]) == 3


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("prompt", ["x" * CONTEXT, [120] * CONTEXT])
async def test_a_prompt_that_fills_the_context_is_scored(
    fields: dict[str, Any], prompt: Any
) -> None:
    body = {"prompt": prompt, "max_tokens": 0, **fields}
    answer = await scored(body, "y")
    (choice,) = answer["choices"]
    assert choice["text"] == ("x" * CONTEXT if "echo" in fields else "")
    described = choice.get("prompt_logprobs") or choice["logprobs"]["token_logprobs"]
    assert len(described) == CONTEXT
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (CONTEXT, 0)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [120] * (CONTEXT + 1), "max_tokens": 0, "echo": True},
        {"prompt": "x" * (CONTEXT + 1), "max_tokens": 0, "prompt_logprobs": 0},
        {"prompt": [120] * CONTEXT, "max_tokens": 1, "echo": True},
        {"prompt": [120] * CONTEXT, "echo": True},
    ],
)
async def test_a_prompt_with_no_room_for_what_is_asked(body: dict[str, Any]) -> None:
    async with serving() as server:
        answer = await server.post(COMPLETIONS, body)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "echo": False}, "max_tokens"),
        ({"prompt": [300], "echo": True}, "prompt"),
        ({"prompt": [1] * 10_000, "echo": True}, "prompt"),
        ({"prompt": "a", "echo": 1}, "echo"),
    ],
)
async def test_what_cannot_be_echoed(body: dict[str, Any], param: str) -> None:
    async with serving() as server:
        answer = await server.post(COMPLETIONS, body)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert not server.leader.of(AddRequest)


async def test_fan_out_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's advisories on `n` and prompt lists: a small body that becomes a large amount of work
    and memory (CWE-770)."""
    wide = {"prompt": [[1] * 100] * 8, "n": 128, "max_tokens": 1}
    described = {"prompt": [[1] * 100] * 8, "n": 4, "max_tokens": 1, "prompt_logprobs": 20}
    echoed = {**described, "prompt_logprobs": None, "echo": True, "logprobs": 20}
    async with serving(max_concurrent_requests=2000) as server:
        monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS_PER_REQUEST", 100 * 1023)
        monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS_PER_REQUEST", 100 * 4 * 8 * 21 - 1)
        for body in (wide, described, echoed):
            answer = await server.post(COMPLETIONS, body)
            assert (answer.status, answer.error["param"]) == (400, "prompt"), body
            assert "the limit is" in answer.error["message"]
        answer = await server.post(COMPLETIONS, {"prompt": ["a"] * 9, "n": 128})
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert not server.leader.of(AddRequest)
