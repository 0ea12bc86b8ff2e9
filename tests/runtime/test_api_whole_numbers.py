"""Whole numbers that clients write as 1.0, as JSON's schemas and OpenAI's servers take them."""

import asyncio
import json
import time
from typing import Any

import jsonschema
import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, serving

from aioengine import limits
from aioengine.api.decoding import decode_body, decode_sampling_body
from aioengine.api.errors import ApiError
from aioengine.api.schema import ChatBody, CompletionBody, DetokenizeBody, RpcBody, TokenizeBody
from aioengine.messages import AddRequest

FIELDS = ["n", "top_k", "seed", "priority", "max_tokens", "min_tokens", "prompt_logprobs"]
KINDS = [
    *[(CompletionBody, PROMPT, name) for name in [*FIELDS, "logprobs", "best_of"]],
    *[(ChatBody, MESSAGES, name) for name in [*FIELDS, "top_logprobs", "max_completion_tokens"]],
    (RpcBody, {"method": "m"}, "unique_reply_rank"),
]


def encoded(body: dict[str, Any], field: str, literal: str) -> bytes:
    return json.dumps(body)[:-1].encode() + f', "{field}": {literal}}}'.encode()


@pytest.mark.parametrize(("kind", "base", "field"), KINDS)
def test_every_field_of_whole_numbers(kind: Any, base: dict[str, Any], field: str) -> None:
    for literal in ("2.0", "2e0", "0.2e1"):
        value = getattr(decode_body(encoded(base, field, literal), kind), field)
        assert (value, type(value)) == (2, int)
    for literal in ("1.5", "1e300", "9223372036854775808.0", "-1e19"):
        with pytest.raises(ApiError) as raised:
            decode_body(encoded(base, field, literal), kind)
        assert (raised.value.status, raised.value.param) == (400, field), literal


def test_bounds_hold_for_them() -> None:
    with pytest.raises(ApiError, match="n: Expected `int` <= 128"):
        decode_body(encoded(PROMPT, "n", "129.0"), CompletionBody)
    with pytest.raises(ApiError, match="n: Expected `int` >= 1"):
        decode_body(encoded(PROMPT, "n", "-0.0"), CompletionBody)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1.0, 2], [[1, 2]]), ([[1.0], [2.0, 3]], [[1], [2, 3]])],
)
def test_token_ids(prompt: Any, expected: list[list[int]]) -> None:
    data = json.dumps({"prompt": prompt, "stop_token_ids": [7.0]}).encode()
    body = decode_body(data, CompletionBody)
    assert body.prompts() == expected
    assert body.stop_token_ids == [7]
    assert decode_body(b'{"tokens": [1.0, 2]}', DetokenizeBody).tokens == [1, 2]
    with pytest.raises(ApiError, match=r"prompt\[1\]: Expected .*, got `float`"):
        decode_body(b'{"prompt": [1.0, 2.5]}', CompletionBody)


def test_numbers_elsewhere_stay_as_they_are() -> None:
    """Also beside one that is taken as whole: a template or a method may tell 1.0 from 1."""
    chat = encoded(MESSAGES, "chat_template_kwargs", '{"x": 1.0, "y": [2.0]}, "n": 1.0')
    assert str(decode_body(chat, ChatBody).chat_template_kwargs) == "{'x': 1.0, 'y': [2.0]}"
    data = b'{"method": "m", "args": [1.0], "kwargs": {"a": 2.0}, "unique_reply_rank": 0.0}'
    call = decode_body(data, RpcBody)
    assert str([call.args, call.kwargs, call.unique_reply_rank]) == "[[1.0], {'a': 2.0}, 0]"
    text = encoded({"prompt": '{"n": 1.0}'}, "n", "1.0")
    assert decode_body(text, CompletionBody).prompt == '{"n": 1.0}'


def test_other_types_are_no_numbers() -> None:
    for literal in ('"1"', "true", "[1.0]", '{"a": 1.0}', '"1.0"'):
        for beside in ("", ', "seed": 1.0'):
            with pytest.raises(ApiError) as raised:
                decode_body(encoded(PROMPT, "n", literal + beside), CompletionBody)
            assert raised.value.param == "n"
    with pytest.raises(ApiError) as raised:
        decode_body(encoded(PROMPT, "add_generation_prompt", "1.0"), TokenizeBody)
    assert raised.value.param == "add_generation_prompt"


def test_unknown_fields_are_still_told() -> None:
    data = encoded({**PROMPT, "novel": 1.0}, "n", "2.0")
    assert decode_sampling_body(data, CompletionBody)[1] == ["novel"]


def test_a_large_body_of_them_is_refused_at_once() -> None:
    """Seconds of this thread's processor: the event loop waits."""
    for size in (limits.MAX_SEARCHED_BYTES, limits.MAX_BODY_BYTES):
        data = b'{"prompt": [' + b"1.0," * (size // 4 - 8) + b"1.5]}"
        started = time.thread_time()
        with pytest.raises(ApiError) as raised:
            decode_body(data, CompletionBody)
        assert raised.value.param == "prompt"
        assert time.thread_time() - started < 0.5


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
async def test_served_as_the_document_says(path: str, base: dict[str, Any]) -> None:
    body = {**base, "n": 2.0, "max_tokens": 3.0, "seed": 5.0}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        found = (await server.get("/openapi.json")).json
        content = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = {**content["schema"], "components": found["components"]}
        jsonschema.Draft202012Validator(schema).validate(body)
        assert not jsonschema.Draft202012Validator(schema).is_valid({**body, "n": 1.5})
        asked = tasks.create_task(server.post(path, body))
        added = await server.play("abc", count=2)
        answer = await asked
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    assert {(request.params.max_tokens, request.params.seed) for request in added} == {(3, 5)}
    async with serving() as server:
        answer = await server.post(path, {**base, "n": 1.5})
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert not server.leader.of(AddRequest)
