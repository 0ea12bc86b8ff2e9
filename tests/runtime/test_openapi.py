"""The OpenAPI document says what the server does."""

import re
from typing import Any

import jsonschema
import msgspec
import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, serving
from support.tiny_model import BOS_ID, EOS_ID, MODEL_NAME, TEMPLATE, VOCAB_SIZE

from aioengine import limits
from aioengine.api.app import build_app
from aioengine.api.openapi import OPERATIONS, describe
from aioengine.api.schema import UNSUPPORTED, ChatBody, CompletionBody


async def document() -> Any:
    async with serving() as server:
        answer = await server.get("/openapi.json")
    assert answer.status == 200
    return answer.json


def of_body(found: Any, name: str) -> jsonschema.Draft202012Validator:
    """What a body of this type may be."""
    root = {"$ref": f"#/components/schemas/{name}", "components": found["components"]}
    return jsonschema.Draft202012Validator(root)


async def test_every_route_is_there_with_sound_schemas() -> None:
    found = await document()
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(found)):
        assert reference in found["components"]["schemas"]
    async with serving() as server:
        handlers = {route.handler for route in build_app(server.api).router.routes()}
    assert handlers == OPERATIONS.keys()
    assert found["paths"][COMPLETIONS].keys() == {"post"}
    assert found["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["schema"] == {
        "enum": [MODEL_NAME]
    }


async def test_what_bodies_may_hold_is_known() -> None:
    found = await document()
    schemas = found["components"]["schemas"]
    for kind in (CompletionBody, ChatBody):
        names = schemas[kind.__name__]["properties"].keys()
        assert names == {*kind.__struct_fields__, *UNSUPPORTED}
    ids = schemas["DetokenizeBody"]["properties"]["tokens"]["items"]
    assert ids["exclusiveMaximum"] == VOCAB_SIZE
    assert schemas["CompletionBody"]["properties"]["model"]["enum"] == [None, MODEL_NAME]


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    # path, type of the body, what the schema and the server refuse
    (COMPLETIONS, "CompletionBody", {}),
    (COMPLETIONS, "CompletionBody", {"prompt": []}),
    (COMPLETIONS, "CompletionBody", {"prompt": [[]]}),
    (COMPLETIONS, "CompletionBody", {"prompt": ["a", 1]}),
    (COMPLETIONS, "CompletionBody", {"prompt": [VOCAB_SIZE]}),
    (COMPLETIONS, "CompletionBody", {"prompt": ["a"] * (limits.MAX_PROMPTS_PER_REQUEST + 1)}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "model": "another"}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "max_tokens": -1}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "logit_bias": {"x": 1}}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "stop": ["x"] * (limits.MAX_STOP_STRINGS + 1)}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "best_of": 0}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "suffix": "x"}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "use_beam_search": 0}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, **{f"x{i}": 0 for i in range(300)}}),
    (COMPLETIONS, "CompletionBody", {**PROMPT, "stream_options": {"include_obfuscation": True}}),
    (CHAT, "ChatBody", {"messages": []}),
    (CHAT, "ChatBody", {**MESSAGES, "max_tokens": 0}),
    (CHAT, "ChatBody", {**MESSAGES, "response_format": {"type": "json_object"}}),
    (CHAT, "ChatBody", {**MESSAGES, "tools": [{"type": "function"}]}),
    (CHAT, "ChatBody", {**MESSAGES, "echo": True}),
    (CHAT, "ChatBody", {**MESSAGES, "chat_template": "x"}),
    (CHAT, "ChatBody", {**MESSAGES, "best_of": 2}),
    ("/tokenize", "TokenizeBody", {**MESSAGES, "chat_template": "x"}),
    ("/tokenize", "TokenizeBody", {"prompt": "a", "chat_template": "x"}),
    ("/tokenize", "TokenizeBody", {**MESSAGES, "tools": [{}]}),
    ("/tokenize", "TokenizeBody", {**MESSAGES, "documents": [{}]}),
    (CHAT, "ChatBody", {"messages": [{"role": "user", "content": [{"text": "a"}]}]}),
    (CHAT, "ChatBody", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, "ChatBody", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
]


@pytest.mark.parametrize(("path", "kind", "body"), REFUSED, ids=lambda value: str(value)[:60])
async def test_schema_and_server_refuse_the_same(
    path: str, kind: str, body: dict[str, Any]
) -> None:
    async with serving() as server:
        found = (await server.get("/openapi.json")).json
        assert not of_body(found, kind).is_valid(body)
        answer = await server.post(path, body)
        assert answer.status in (400, 404)
        errors = jsonschema.Draft202012Validator(
            {"$ref": "#/components/schemas/ErrorAnswer", "components": found["components"]}
        )
        errors.validate(answer.json)


@pytest.mark.parametrize("position", [0, -1])
async def test_neutral_values_are_allowed(position: int) -> None:
    found = await document()
    for name, kind, base in (
        ("CompletionBody", CompletionBody, PROMPT),
        ("ChatBody", ChatBody, MESSAGES),
    ):
        names = UNSUPPORTED.keys() - kind.__struct_fields__
        body = {**base, **{name: UNSUPPORTED[name][position] for name in names}}
        of_body(found, name).validate(body)


async def test_keys_and_prefixes_of_this_server() -> None:
    settings: dict[str, Any] = {"root_path": "/llm", "api_key": ("sesame",)}
    async with serving(states=("ready", "ready"), **settings) as server:
        assert (await server.get("/llm/openapi.json")).status == 401
        found = describe(build_app(server.api))
    assert found["servers"] == [{"url": "/llm"}]
    paths = found["paths"]
    assert paths["/livez"]["get"]["security"] == []
    assert paths["/metrics"]["get"]["security"] == []
    assert paths[CHAT]["post"]["security"] == [{"apiKey": []}]
    assert paths["/trace/state"]["get"]["security"] == [{"adminKey": []}]
    (pin,) = paths[CHAT]["post"]["parameters"]
    assert pin["schema"]["exclusiveMaximum"] == 2


async def test_before_the_model_is_known() -> None:
    async with serving(states=("starting",), has_model=False) as server:
        found = describe(build_app(server.api))
    assert msgspec.json.encode(found)
    assert "anyOf" in found["components"]["schemas"]["ChatBody"]["properties"]["model"]


async def test_the_tokenizer_s_special_tokens() -> None:
    """What lm-eval's remote tokenizer reads."""
    async with serving() as server:
        info = (await server.get("/tokenizer_info")).json
    assert (info["bos_token"], info["bos_token_id"]) == ("<s>", BOS_ID)
    assert (info["eos_token"], info["eos_token_ids"]) == ("</s>", [EOS_ID])
    assert (info["vocab_size"], info["max_model_len"]) == (VOCAB_SIZE, 200)
    assert info["chat_template"] == TEMPLATE
