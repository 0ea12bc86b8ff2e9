"""Penalties, logit_bias, min_tokens and prompt_logprobs over HTTP."""

import asyncio
import json
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, Served, serving
from support.tiny_model import EOS_ID, VOCAB_SIZE, ids

from aioengine import limits
from aioengine.messages import AddRequest, RequestDelta, TokenLogprobs

ROUTES = [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)]


@pytest.mark.parametrize(("path", "base"), ROUTES)
async def test_the_fields_reach_the_leader(path: str, base: dict[str, Any]) -> None:
    body = {
        **base,
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "299": 1.5},
        "min_tokens": 3,
        "max_tokens": 3,
        "stop_token_ids": [9],
    }
    async with serving() as server, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(server.post(path, body))
        ((added),) = await server.play("abc")
        params = added.params
        assert (params.presence_penalty, params.frequency_penalty) == (-2.0, 1.5)
        assert params.repetition_penalty == 1.25
        assert params.logit_bias == ((5, -100.0), (299, 1.5))
        assert (params.min_tokens, params.stop_token_ids) == (3, (9, EOS_ID))
        assert (await answer).status == 200


@pytest.mark.parametrize(("path", "base"), ROUTES)
async def test_null_asks_for_nothing(path: str, base: dict[str, Any]) -> None:
    names = ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"]
    body = {**base, **dict.fromkeys([*names, "min_tokens", "prompt_logprobs"])}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(server.post(path, body))
        (added,) = await server.play("a")
        params = added.params
        assert (params.presence_penalty, params.frequency_penalty) == (0, 0)
        assert (params.repetition_penalty, params.logit_bias) == (1, ())
        assert (params.min_tokens, params.prompt_logprobs) == (0, None)
        assert "prompt_logprobs" not in (await answer).text


@pytest.mark.parametrize(("path", "base"), ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("presence_penalty", "1"),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e9),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "much"}),
        ("logit_bias", {str(VOCAB_SIZE): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x" * 5000: 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {str(i): 1 for i in range(limits.MAX_LOGIT_BIAS + 1)}),
        ("logit_bias", [1]),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
    ],
)
async def test_what_does_not_fit_is_refused(
    path: str, base: dict[str, Any], field: str, value: Any
) -> None:
    async with serving() as server:
        answer = await server.post(path, {**base, "max_tokens": 16, field: value})
        assert answer.status == 400
        assert answer.error["param"].startswith(field)
        assert field in answer.error["message"]
        assert len(answer.text) < 500


async def test_an_unknown_id_is_named() -> None:
    async with serving() as server:
        answer = await server.post(COMPLETIONS, {**PROMPT, "logit_bias": {"4711": 1}})
        assert "'4711' is not a token id" in answer.error["message"]


async def test_nan_is_no_number() -> None:
    body = json.dumps({**PROMPT, "frequency_penalty": float("nan")}).encode()
    async with serving() as server:
        assert (await server.post(COMPLETIONS, body)).status == 400


@pytest.mark.parametrize(("path", "base"), ROUTES)
async def test_prompt_logprobs_are_not_streamed(path: str, base: dict[str, Any]) -> None:
    async with serving() as server:
        answer = await server.post(path, {**base, "stream": True, "prompt_logprobs": 1})
        assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")


def give_prompt_logprobs(server: Served, added: AddRequest) -> None:
    """In two deltas, as chunks of a prefill bring them."""
    items = tuple(
        TokenLogprobs(-float(position), ((ord("z"), -0.5), (added.token_ids[position], -9.0)), 7)
        for position in range(1, len(added.token_ids))
    )
    for part in (items[:2], items[2:]):
        server.leader.report(RequestDelta(added.request_id, (), prompt_logprobs=part))


def check_form(described: list[Any], prompt: tuple[int, ...]) -> None:
    assert described[0] is None
    assert len(described) == len(prompt)
    for position, token_id in list(enumerate(prompt))[1:]:
        own, other = described[position].items()
        text = chr(token_id)
        assert own == (
            str(token_id),
            {"logprob": -float(position), "rank": 7, "decoded_token": text},
        )
        assert other == (str(ord("z")), {"logprob": -0.5, "rank": 1, "decoded_token": "z"})


async def test_a_completion_carries_prompt_logprobs_with_every_choice() -> None:
    body = {"prompt": ["hello", "worlds"], "n": 2, "prompt_logprobs": 2}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(server.post(COMPLETIONS, body))
        added = await server.leader.added(4)
        assert [one.params.prompt_logprobs for one in added] == [2, None, 2, None]
        for one in (added[0], added[2]):
            give_prompt_logprobs(server, one)
        await server.play("x", count=4)
        choices = (await answer).json["choices"]
        for choice, prompt in zip(choices, ["hello", "hello", "worlds", "worlds"], strict=True):
            check_form(choice["prompt_logprobs"], ids(prompt))


async def test_a_chat_completion_carries_prompt_logprobs_itself() -> None:
    body = {**MESSAGES, "n": 2, "prompt_logprobs": 2}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(server.post(CHAT, body))
        first, _ = await server.leader.added(2)
        give_prompt_logprobs(server, first)
        await server.play("x", count=2)
        response = (await answer).json
        assert "prompt_logprobs" not in response["choices"][0]
        check_form(response["prompt_logprobs"], first.token_ids)


async def test_a_prompt_of_one_token_has_none() -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        body = {"prompt": "h", "prompt_logprobs": 0}
        answer = tasks.create_task(server.post(COMPLETIONS, body))
        await server.play("x")
        assert (await answer).json["choices"][0]["prompt_logprobs"] == [None]
