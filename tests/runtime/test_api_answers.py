"""Whole answers: what a leader's deltas become."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, Answer, Served, serving
from support.tiny_model import EOS_ID, MODEL_NAME, ids

from aioengine.messages import ChoiceParams, FinishReason
from aioengine.model_config import DefaultSampling

CHAT_PROMPT = "<user>hello\n<assistant>"


async def asked(
    server: Served,
    path: str,
    body: dict[str, Any],
    *texts: str,
    count: int = 1,
    finish_reason: FinishReason = "length",
    **fields: Any,
) -> Answer:
    """Send a body; give each of its `count` choices the texts, one per step."""
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(server.post(path, body))
        await server.play(*texts, count=count, finish_reason=finish_reason, **fields)
    assert answer.result().status == 200, answer.result().text
    return answer.result()


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def test_a_completion() -> None:
    async with serving() as server:
        body = (await asked(server, COMPLETIONS, PROMPT, "wor", "ld", num_cached_tokens=4)).json
        (choice,) = body["choices"]
        assert choice == {
            "index": 0,
            "text": "world",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        assert (body["object"], body["model"]) == ("text_completion", MODEL_NAME)
        assert body["id"].startswith("cmpl-")
        assert body["usage"] == usage(5, 5, cached=4)
        (added,) = await server.leader.added()
        assert added.token_ids == ids("hello")
        assert added.params.max_tokens == 16


async def test_a_chat_completion() -> None:
    async with serving() as server:
        body = (await asked(server, CHAT, MESSAGES, "hi")).json
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hi"}
        assert (choice["index"], choice["logprobs"]) == (0, None)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert (body["object"], body["model"]) == ("chat.completion", MODEL_NAME)
        assert body["id"].startswith("chatcmpl-")
        assert body["usage"] == usage(len(CHAT_PROMPT), 2)
        (added,) = await server.leader.added()
        assert added.token_ids == ids(CHAT_PROMPT)
        assert added.params.max_tokens == 200 - len(CHAT_PROMPT)


async def test_the_content_of_a_message_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    body = {"messages": messages, "add_generation_prompt": False, "max_completion_tokens": 3}
    async with serving() as server:
        await asked(server, CHAT, body, "x")
        (added,) = await server.leader.added()
        assert added.token_ids == ids("<user>hello\n<assistant>\n")
        assert added.params.max_tokens == 3


async def test_every_sampling_field_reaches_the_replica() -> None:
    fields = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": -1,
        "stop_token_ids": [5, EOS_ID, 5],
        "logprobs": 2,
    }
    async with serving() as server:
        await asked(server, COMPLETIONS, {**PROMPT, **fields, "priority": -1}, "x")
        (added,) = await server.leader.added()
        assert added.priority == -1
        assert added.params == ChoiceParams(
            max_tokens=7,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            seed=2**63 - 1,
            stop_token_ids=(5, EOS_ID),
            logprobs=2,
        )


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({}, "temperature", 1.0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-6}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({}, "stop_token_ids", (EOS_ID,)),
        ({"ignore_eos": True}, "stop_token_ids", ()),
        ({}, "logprobs", None),
        ({"logprobs": 0}, "logprobs", 0),
    ],
)
async def test_defaults(fields: dict[str, Any], attribute: str, value: object) -> None:
    async with serving() as server:
        await asked(server, COMPLETIONS, {**PROMPT, **fields}, "x")
        (added,) = await server.leader.added()
        assert getattr(added.params, attribute) == value


def author_chose(server: Served, **choices: Any) -> None:
    """What a generation_config.json says."""
    assert server.api.model is not None
    config = msgspec.structs.replace(server.api.model.config, **choices)
    server.api.model = replace(server.api.model, config=config)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.5, 7, 0.25, 0.125, 1.25)),
        (
            {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1},
            (0.0, 0, 1.0, 0.0, 1.0),
        ),
        ({"temperature": None, "top_k": 3}, (0.5, 3, 0.25, 0.125, 1.25)),
    ],
)
async def test_the_model_s_own_defaults_fill_what_a_request_leaves_out(
    fields: dict[str, Any], expected: tuple[float, ...]
) -> None:
    chosen = DefaultSampling(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.25
    )
    async with serving() as server:
        author_chose(server, default_sampling=chosen)
        await asked(server, COMPLETIONS, {**PROMPT, **fields}, "x")
        (added,) = await server.leader.added()
        fields_sent = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        assert tuple(getattr(added.params, name) for name in fields_sent) == expected


@pytest.mark.parametrize(
    ("path", "fields", "author", "expected"),
    [
        (CHAT, {}, None, 200 - len("<user>hello\n<assistant>")),
        (CHAT, {}, 9, 9),
        (CHAT, {}, 10_000, 200 - len("<user>hello\n<assistant>")),
        (CHAT, {"max_tokens": 20}, 9, 20),
        (CHAT, {"max_completion_tokens": 20}, 9, 20),
        (COMPLETIONS, {}, None, 16),
        (COMPLETIONS, {}, 9, 9),
        (COMPLETIONS, {}, 100, 16),
        (COMPLETIONS, {"max_tokens": 20}, 9, 20),
    ],
)
async def test_answers_for_which_no_length_was_asked(
    path: str, fields: dict[str, Any], author: int | None, expected: int
) -> None:
    """The author's number is a default; what a request asks for is never cut short."""
    base = PROMPT if path == COMPLETIONS else MESSAGES
    async with serving() as server:
        author_chose(server, default_max_tokens=author)
        await asked(server, path, {**base, **fields}, "x")
        (added,) = await server.leader.added()
        assert added.params.max_tokens == expected


async def test_requests_without_a_seed_get_different_ones() -> None:
    async with serving() as server:
        await asked(server, COMPLETIONS, PROMPT, "x")
        await asked(server, COMPLETIONS, {**PROMPT, "n": 2}, "x", count=3)
        seeds = [(a.params.seed, a.params.choice_index) for a in await server.leader.added(3)]
        assert seeds[0][0] != seeds[1][0] == seeds[2][0]
        assert [index for _, index in seeds] == [0, 0, 1]


async def test_a_stop_token_is_no_text() -> None:
    async with serving() as server:
        body = (await asked(server, COMPLETIONS, PROMPT, "hi.", finish_reason="stop")).json
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
        assert choice["stop_reason"] == ord(".")
        assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("include", "text"), [(False, "some "), (True, "some END")])
async def test_a_stop_string(include: bool, text: str) -> None:
    body = {**PROMPT, "stop": ["END", "no"], "include_stop_str_in_output": include}
    async with serving() as server:
        answer = await asked(server, COMPLETIONS, body, "some E", "ND and", " more")
        (choice,) = answer.json["choices"]
        assert choice["text"] == text
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
        assert answer.json["usage"]["completion_tokens"] == len("some END")
        await server.leader.aborted()


async def test_stop_strings_count_only_after_min_tokens() -> None:
    body = {**PROMPT, "stop": "END", "min_tokens": 4}
    async with serving() as server:
        answer = await asked(server, COMPLETIONS, body, "END", " and", " END", " more")
        (choice,) = answer.json["choices"]
        assert choice["text"] == "END and "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


# --- several choices -----------------------------------------------------------------------------


async def test_a_prompt_that_choices_share_counts_once() -> None:
    async with serving() as server:
        answer = await asked(server, CHAT, {**MESSAGES, "n": 3}, "ab", "c", count=3)
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
        assert answer.json["usage"] == usage(len(CHAT_PROMPT), 9)


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        (["a", "bc"], [ids("a"), ids("bc")]),
        ([[1, 2, 3], [4]], [(1, 2, 3), (4,)]),
        ([7, 8], [(7, 8)]),
        ("abc", [ids("abc")]),
    ],
)
async def test_prompts_and_choices(prompt: object, token_ids: list[tuple[int, ...]]) -> None:
    body = {"prompt": prompt, "n": 2, "max_tokens": 1, "return_token_ids": True}
    count = 2 * len(token_ids)
    async with serving() as server:
        answer = (await asked(server, COMPLETIONS, body, "x", count=count)).json
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        wanted = [list(prompt_ids) for prompt_ids in token_ids]
        assert [c["prompt_token_ids"] for c in answer["choices"][::2]] == wanted
        assert [c["prompt_token_ids"] for c in answer["choices"][1::2]] == wanted
        assert answer["prompt_token_ids"] == (wanted if len(wanted) > 1 else wanted[0])
        assert answer["usage"] == usage(sum(map(len, wanted)), count)
        added = await server.leader.added(count)
        assert [list(request.token_ids) for request in added[::2]] == wanted
        assert [request.params.choice_index for request in added] == [0, 1] * len(wanted)


async def test_as_many_choices_as_allowed() -> None:
    async with serving() as server:
        body = {"prompt": ["a"] * 64, "n": 2, "max_tokens": 1}
        answer = await asked(server, COMPLETIONS, body, "x", count=128)
        assert answer.json["usage"] == usage(64, 128)


# --- token ids and log probabilities -------------------------------------------------------------


async def test_token_ids_of_a_chat() -> None:
    async with serving() as server:
        body = {**MESSAGES, "return_token_ids": True}
        answer = (await asked(server, CHAT, body, "hi", ".", finish_reason="stop")).json
        assert answer["prompt_token_ids"] == list(ids(CHAT_PROMPT))
        assert answer["choices"][0]["token_ids"] == list(ids("hi."))
        assert answer["choices"][0]["message"]["content"] == "hi"


async def test_log_probabilities_of_a_completion() -> None:
    async with serving() as server:
        answer = await asked(server, COMPLETIONS, {**PROMPT, "logprobs": 2}, "h", "é")
        assert answer.json["choices"][0]["logprobs"] == {
            "tokens": ["h", "\ufffd", "\ufffd"],
            "token_logprobs": [-0.5] * 3,
            "top_logprobs": [
                {"h": -0.5, "a": -1.0, "b": -2.0},
                {"\ufffd": -0.5, "a": -1.0, "b": -2.0},
                {"\ufffd": -0.5, "a": -1.0, "b": -2.0},
            ],
            "text_offset": [0, 1, 1],
        }


async def test_log_probabilities_of_a_chat() -> None:
    async with serving() as server:
        body = {**MESSAGES, "logprobs": True, "top_logprobs": 1}
        answer = await asked(server, CHAT, body, "hé")
        entries = answer.json["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in entries] == [[byte] for byte in "hé".encode()]
        assert [entry["token"] for entry in entries] == ["h", "\ufffd", "\ufffd"]
        assert {entry["logprob"] for entry in entries} == {-0.5}
        top = [{"token": "a", "logprob": -1.0, "bytes": [97]}]
        assert all(entry["top_logprobs"] == top for entry in entries)


async def test_log_probabilities_without_alternatives() -> None:
    async with serving() as server:
        answer = await asked(server, CHAT, {**MESSAGES, "logprobs": True}, "x")
        (entry,) = answer.json["choices"][0]["logprobs"]["content"]
        assert entry["top_logprobs"] == []


async def test_log_probabilities_of_the_chosen_tokens_alone() -> None:
    async with serving() as server:
        answer = await asked(server, COMPLETIONS, {**PROMPT, "logprobs": 0}, "xa")
        logprobs = answer.json["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{"x": -0.5}, {"a": -0.5}]
        answer = await asked(server, COMPLETIONS, {**PROMPT, "logprobs": 1}, "xa", count=2)
        logprobs = answer.json["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{"x": -0.5, "a": -1.0}, {"a": -1.0}]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_log_probabilities_of_several_choices(path: str) -> None:
    """Each has its own; offsets begin anew."""
    body: dict[str, Any] = {**PROMPT, "logprobs": 0, "n": 2}
    if path == CHAT:
        body = {**MESSAGES, "logprobs": True, "n": 2}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked_for = tasks.create_task(server.post(path, body))
        first, second = await server.leader.added(2)
        server.leader.answer(first, ids("ab"))
        server.leader.answer(second, ids("xyz"), "length")
        server.leader.answer(first, ids("c"), "length")
        found = [choice["logprobs"] for choice in (await asked_for).json["choices"]]
        if path == CHAT:
            tokens = ["".join(entry["token"] for entry in part["content"]) for part in found]
        else:
            tokens = ["".join(part["tokens"]) for part in found]
            assert [part["text_offset"] for part in found] == [[0, 1, 2], [0, 1, 2]]
        assert tokens == ["abc", "xyz"]


async def test_log_probabilities_end_where_a_stop_string_does() -> None:
    async with serving() as server:
        body = {**PROMPT, "logprobs": 0, "stop": "!", "return_token_ids": True}
        (choice,) = (await asked(server, COMPLETIONS, body, "a!b")).json["choices"]
        assert choice["text"] == "a"
        assert choice["token_ids"] == list(ids("a!"))
        assert choice["logprobs"]["tokens"] == ["a", "!"]


# --- failures ------------------------------------------------------------------------------------


async def test_a_failure_is_a_503_with_the_cause() -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(server.post(path, body)) for path, body in
                   ((COMPLETIONS, PROMPT), (CHAT, MESSAGES))]  # fmt: skip
        first, second = await server.leader.added(2)
        server.leader.answer(first, ids("x"))
        server.leader.answer(first, (), "error", error="NaN logits")
        server.leader.answer(second, ids("x"))
        server.leader.fail("rank 3 is gone")
        found = [await answer for answer in answers]
        assert {a.status for a in found} == {503}
        assert {a.error["message"] for a in found} == {"NaN logits", "rank 3 is gone"}
        assert all(a.headers["Retry-After"] for a in found)


async def test_a_client_that_leaves_aborts_its_requests() -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        for path, body in ((COMPLETIONS, PROMPT), (CHAT, MESSAGES)):
            leaving = tasks.create_task(server.post(path, {**body, "n": 2}))
            num_before = len(server.leader.messages)
            await server.leader.until(lambda n=num_before: len(server.leader.messages) == n + 2)
            leaving.cancel()
            await server.leader.until(lambda n=num_before: len(server.leader.messages) == n + 4)
        assert server.front_end.num_live == 0
        assert len(await server.leader.aborted(4)) == 4
