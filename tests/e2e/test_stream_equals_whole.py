"""300 random requests, each streamed and not: what a stream's events come to is the whole answer.

Stop strings, emoji, Japanese, byte fallback, several choices, log probabilities, echo: text, token
ids, log probabilities, finish reasons and usage.
"""

import asyncio
import random
from typing import Any

import aiohttp
import msgspec
import pytest
from support.launching import STORIES, Launch, post, stream

from aioengine.api.answers import ChatChunk, ChatCompletion, Completion, CompletionPart

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_REQUESTS = 300
NUM_AT_A_TIME = 32
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXTS = ("Once upon a time", "🙂 größe", "日本語のテキスト", "<s>Tim", " ", "Lily\nsaid", "👩‍👩‍👧é")
BYTE_TOKENS = range(3, 259)
"""Of the model's vocabulary: <0x00> to <0xFF>."""
TOLERANCE = 1e-5


async def test_streams_equal_whole_answers() -> None:
    chance = random.Random(20)
    bodies = [random_body(chance) for _ in range(NUM_REQUESTS)]
    room = asyncio.Semaphore(NUM_AT_A_TIME)
    with Launch("--model", str(STORIES)) as launch:
        url = launch.wait_ready()
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(url, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            running = [tasks.create_task(check(session, room, *one)) for one in bodies]
    choices = [choice for task in running for choice in task.result()]
    assert sum("\ufffd" in choice["text"] for choice in choices) > 20
    assert sum(any(char in choice["text"] for char in "🙂日é") for choice in choices) > 20
    assert sum(isinstance(choice["stop_reason"], str) for choice in choices) > 20
    assert sum(isinstance(choice["stop_reason"], int) for choice in choices) > 5
    assert sum(len(choice["numbers"]) > 0 for choice in choices) > 100
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}


def random_body(chance: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 40),
        "temperature": chance.choice([0, 0.8, 1.5]),
        "seed": chance.randrange(1000),
        "return_token_ids": True,
    }
    options: dict[str, Any] = {
        "n": chance.choice([2, 3]),
        "stop": chance.choice([["the", "ly"], "a", [".", "🙂"], [" was a", " w"]]),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
        "min_tokens": 1,
        "stop_token_ids": [chance.randrange(259, 512) for _ in range(20)],
        "presence_penalty": 0.5,
    }
    if chance.random() < 0.3:  # broken and whole characters, by bytes
        ids = [chance.randrange(BYTE_TOKENS.start, BYTE_TOKENS.stop) for _ in range(60)]
        ids += [token_id + 3 for char in TEXTS[1] + TEXTS[2] for token_id in char.encode()]
        options["logit_bias"] = {str(token_id): chance.choice([4, 9]) for token_id in ids}
        body |= {"logit_bias": options["logit_bias"], "temperature": 1.2}
    for name in chance.sample(sorted(options), chance.randrange(5)):
        body[name] = options[name]
    if chance.random() < 0.3:
        body["messages"] = [{"role": "user", "content": chance.choice(TEXTS)}]
        if chance.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": chance.randrange(4)}
        return CHAT, body
    prompts: list[Any] = [*TEXTS, [1, *(chance.randrange(3, 512) for _ in range(9))]]
    body["prompt"] = chance.choice([*prompts, list(TEXTS[:2]), [[1, 400], [1, 300, 200]]])
    if chance.random() < 0.5:
        body["logprobs"] = chance.randrange(4)
    if chance.random() < 0.4:
        body["echo"] = True
        body["max_tokens"] = chance.choice([0, 1, body["max_tokens"]])
        body["min_tokens"] = 0
    return COMPLETIONS, body


async def check(
    session: aiohttp.ClientSession, room: asyncio.Semaphore, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """The choices. Numbers may differ by rounding: another batch, or a prompt that the cache
    held."""
    async with room:
        whole = await post(session, path, body)
        usage = {"stream_options": {"include_usage": True}}
        events = await stream(session, path, {**body, **usage})
    part, answer = (
        (CompletionPart, Completion) if path == COMPLETIONS else (ChatChunk, ChatCompletion)
    )
    msgspec.convert(whole, answer)
    for event in events:
        msgspec.convert(event, part)
    found = joined(events)
    choices = [flat(choice) for choice in whole["choices"]]
    for choice in choices:
        same(found.pop(choice["index"]), choice, body)
    assert not found
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][name] == whole["usage"][name], body
    return choices


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            part = flat(choice)
            if (whole := choices.get(choice["index"])) is None:
                choices[choice["index"]] = part
                continue
            for name in ("text", "token_ids", "numbers", "words"):
                whole[name] += part[name]
            assert whole["finish_reason"] is None
            whole |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return choices


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of either route, whole or in part, with its log probabilities in a row."""
    body = choice.get("message") or choice.get("delta") or {}
    words: list[Any] = []
    numbers: list[float] = []
    logprobs = choice["logprobs"] or {}
    for entry in logprobs.get("content", ()):
        best = entry["top_logprobs"]
        words += [entry["token"], entry["bytes"], *(one["token"] for one in best)]
        numbers += [entry["logprob"], *(one["logprob"] for one in best)]
    columns = [logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "text_offset")]
    for token, logprob, offset, best in zip(
        *columns, logprobs.get("top_logprobs", ()), strict=True
    ):
        words += [token, offset, logprob is None, *(best or ())]
        numbers += [logprob or 0.0, *(best or {}).values()]
    return {
        "index": choice["index"],
        "text": choice.get("text", body.get("content", "")),
        "token_ids": choice.get("token_ids", []),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "words": words,
        "numbers": numbers,
    }


def same(streamed: dict[str, Any], whole: dict[str, Any], body: dict[str, Any]) -> None:
    numbers = pytest.approx(whole["numbers"], abs=TOLERANCE)
    assert streamed == {**whole, "numbers": numbers}, body
