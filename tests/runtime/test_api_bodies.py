"""What is wrong in a body is a 400 that names the field; nothing of it reaches a replica."""

import asyncio
import json
import time
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, Answer, serving
from support.mailbox import settle
from support.tiny_model import ids

from aioengine import limits
from aioengine.api.decoding import decode_sampling_body
from aioengine.api.errors import MAX_MESSAGE_CHARS, ApiError
from aioengine.api.schema import UNSUPPORTED, UNSUPPORTED_PARTS, ChatBody, CompletionBody
from aioengine.messages import AddRequest

CONTEXT = 200
ROUTES = ((COMPLETIONS, PROMPT, CompletionBody), (CHAT, MESSAGES, ChatBody))
DEEP = 100_000


def raw(field: str, literal: str) -> bytes:
    """A completion body with a field that Python would not write."""
    return f'{{"prompt": "hello", "{field}": {literal}}}'.encode()


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def check_named(answer: Answer, path: str) -> None:
    """`param` is the field; the message says where in it."""
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == path.replace("[", ".").partition(".")[0]
    assert path in answer.error["message"]
    assert len(answer.error["message"]) <= MAX_MESSAGE_CHARS


SHARED_FIELDS = [
    # field, value, the path in the message when it is not the field
    ("n", 0, None),
    ("n", -1, None),
    ("n", 1.5, None),
    ("n", True, None),
    ("n", limits.MAX_CHOICES + 1, None),
    ("temperature", -1, None),
    ("temperature", -1e-9, None),
    ("temperature", "hot", None),
    ("top_p", 0, None),
    ("top_p", 1.5, None),
    ("top_k", -5, None),
    ("top_k", 2**31, None),
    ("min_p", -0.1, None),
    ("min_p", 1.1, None),
    ("seed", 2**63, None),
    ("seed", "1", None),
    ("max_tokens", 0, None),
    ("max_tokens", -1, None),
    ("max_tokens", CONTEXT, None),
    ("stop", [""], None),
    ("stop", "", None),
    ("stop", ["x"] * (limits.MAX_STOP_STRINGS + 1), None),
    ("stop", "x" * (limits.MAX_STOP_STRING_CHARS + 1), None),
    ("stop", [1], "stop[0]"),
    ("stop_token_ids", [300], None),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [0] * (limits.MAX_STOP_TOKEN_IDS + 1), None),
    ("stream", "yes", None),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("priority", 2**31, None),
    ("cache_salt", "x" * 257, None),
    ("ignore_eos", 1, None),
    ("logprobs", limits.MAX_LOGPROBS + 1, None),
    ("logprobs", -1, None),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("field", "value", "place"), SHARED_FIELDS)
async def test_fields_of_both_routes(path: str, field: str, value: Any, place: str | None) -> None:
    body = PROMPT if path == COMPLETIONS else MESSAGES
    async with serving() as server:
        check_named(await server.post(path, {**body, field: value}), place or field)
        await settle()
        assert not server.leader.of(AddRequest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (raw("temperature", "1e999"), "temperature"),
        (raw("seed", "9" * 5000), "seed"),
        (raw("n", "1e999"), "n"),
        (raw("temperature", "NaN"), "temperature"),
        (raw("temperature", "Infinity"), "temperature"),
        (raw("temperature", "-Infinity"), "temperature"),
        (raw("logit_bias", '{"1": NaN}'), "logit_bias"),
        (raw("novel", "[1, [NaN]]"), "novel"),
        (raw("best_of", "NaN"), "best_of"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": ["a", "\\udfff"]}', "prompt"),
        (b'{"prompt": "\xff"}', "prompt"),
        (raw("novel", '{"\\ud800": 1}'), "novel"),
        (b'{"prompt":' + b"[" * DEEP + b"]" * DEEP + b"}", "prompt[0][0]"),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else None,
)
async def test_what_json_has_no_word_for_names_its_field(body: bytes, param: str) -> None:
    async with serving() as server:
        check_named(await server.post(COMPLETIONS, body), param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"\\ud800": 1}', "not valid JSON"),
        (b'{"' + b"x" * 65 + b'": NaN}', "not valid JSON"),
        (raw("novel", "NaN" + " " * limits.MAX_SEARCHED_BYTES), "not valid JSON"),
        (b"null", "the body: Expected `object`"),
        (b"[]", "the body: Expected `object`"),
        (b"[" * DEEP + b"]" * DEEP, "the body: Expected `object`"),
        (raw("novel", "[" * DEEP + "]" * DEEP), "nested too deeply"),
        (raw("novel", '{"a":' * DEEP + "1" + "}" * DEEP), "nested too deeply"),
        (raw("novel", f'"{"x" * limits.MAX_BODY_BYTES}"'), "larger than"),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else None,
)
async def test_bodies_in_which_no_field_is_to_blame(path: str, body: bytes, message: str) -> None:
    async with serving() as server:
        answer = await server.post(path, body)
        assert answer.status == (413 if message == "larger than" else 400)
        assert answer.error["param"] is None
        assert message in answer.error["message"]


BOMBS = {
    "names": b",".join(b'"%d":1' % i for i in range(700_000)),
    "names with spaces": b",".join(b'"%d" :1' % i for i in range(600_000)),
    "lists": b'"a":[' + b"[]," * 2_700_000 + b"[]]",
    "objects": b'"chat_template_kwargs":{"a":[' + b"{}," * 2_700_000 + b"{}]}",
    "biases": b'"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}",
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_bodies_that_would_become_millions_of_objects(path: str, name: str) -> None:
    """The class of vLLM's advisories on request bodies that exhaust memory (CWE-770)."""
    body = b'{"prompt":"hello","messages":[],' + BOMBS[name] + b"}"
    assert len(body) > limits.MAX_BODY_BYTES * 0.8
    async with serving() as server:
        answer = await server.post(path, body)
        assert answer.status == 400
        assert "brackets and colons" in answer.error["message"]


def test_the_largest_bodies_that_are_read_hold_up_the_loop_for_moments_only() -> None:
    """Seconds of this thread's processor; a body of names alone took 1.2 s before, lists 0.6 s."""
    half = limits.MAX_BODY_MARKS - 2
    names = b",".join(b'"%07d":1' % i for i in range(half))
    for body in (
        b"{" + names + b"}",
        b'{"prompt":"a","logit_bias":{' + names + b"}}",
        b'{"prompt":[' + b"[]," * (half - 1) + b"[]]}",
    ):
        started = time.thread_time()
        with pytest.raises(ApiError):
            decode_sampling_body(body, CompletionBody)
        assert time.thread_time() - started < 0.5


async def test_a_body_of_many_fields() -> None:
    names = {f"novel{i}": i for i in range(limits.MAX_BODY_FIELDS)}
    async with serving() as server:
        answer = await server.post(COMPLETIONS, {**PROMPT, **names})
        assert (answer.status, answer.error["param"]) == (400, None)
        assert "more than 256 fields" in answer.error["message"]


@pytest.mark.parametrize("kind", sorted(UNSUPPORTED_PARTS))
async def test_parts_of_a_content_that_are_not_served(kind: str) -> None:
    async with serving() as server:
        answer = await server.post(CHAT, chat(user([{"type": kind, kind: {}}])))
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert answer.error["code"] == "unsupported"


async def test_a_long_value_is_not_sent_back() -> None:
    part = {"type": "x" * 100_000, "text": "a"}
    async with serving() as server:
        check_named(await server.post(CHAT, chat(user([part]))), "messages[0].content[0].type")
        answer = await server.post(COMPLETIONS, {**PROMPT, "model": "x" * 100_000})
        assert answer.error["param"] == "model"
        assert len(answer.text) < 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": [[1], [300]]}, "prompt"),
        ({"prompt": "x" * CONTEXT}, "prompt"),
        ({"prompt": [1] * CONTEXT}, "prompt"),
        ({"prompt": ["a"] * 20_000}, "prompt"),
        ({"prompt": ["a"] * 129, "n": 8}, "n"),
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({**PROMPT, "logprobs": True}, "logprobs"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
async def test_prompts(body: dict[str, Any], param: str) -> None:
    async with serving() as server:
        check_named(await server.post(COMPLETIONS, body), param)
        await settle()
        assert not server.leader.of(AddRequest)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(), "messages"),
        ({"messages": "hi"}, "messages"),
        (chat("hi"), "messages[0]"),
        (chat({"content": "x"}), "messages[0].role"),
        (chat({"role": "", "content": "x"}), "messages[0].role"),
        (chat({"role": 1, "content": "x"}), "messages[0].role"),
        (chat(user(1)), "messages[0].content"),
        (chat(user("a"), user({"text": "b"})), "messages[1].content"),
        (chat(user(["b"])), "messages[0].content[0]"),
        (chat(user([{"type": "text"}])), "messages[0].content[0].text"),
        (chat(user([{"text": "b"}])), "messages[0].content[0].type"),
        (chat(user([{"type": "image_url", "image_url": {}}])), "messages[0].content[0].type"),
        (chat({"role": "bad", "content": "x"}), "messages"),
        (chat(*[user("x")] * (limits.MAX_MESSAGES + 1)), "messages"),
        (chat(user("x"), continue_final_message=True), "continue_final_message"),
        (chat(user("x"), continue_final_message=1), "continue_final_message"),
        (chat({"role": "x"}, add_generation_prompt=False, continue_final_message=[]),
         "continue_final_message"),
        (chat(user("x"), add_generation_prompt=None), "add_generation_prompt"),
        (chat(user("x"), chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        (chat(user("x"), chat_template_kwargs=[]), "chat_template_kwargs"),
        (chat(user("x"), chat_template_kwargs={"strict": True}), "chat_template_kwargs"),
        (chat({"role": "bad"}, chat_template_kwargs={"strict": False}), "messages"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
async def test_conversations(path: str, body: dict[str, Any], param: str) -> None:
    async with serving() as server:
        check_named(await server.post(path, body), param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        (chat(user("x" * CONTEXT)), "messages"),
        (chat(user("x"), top_logprobs=2), "top_logprobs"),
        (chat(user("x"), logprobs=False, top_logprobs=2), "top_logprobs"),
        (chat(user("x"), logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(user("x"), logprobs=2), "logprobs"),
        (chat(user("x"), max_completion_tokens=0), "max_completion_tokens"),
        (chat(user("x"), max_completion_tokens=CONTEXT), "max_completion_tokens"),
        (chat(user("x"), max_completion_tokens=CONTEXT, max_tokens=1), "max_completion_tokens"),
        (chat(user("x"), max_tokens=CONTEXT), "max_tokens"),
        (chat(user("x"), min_tokens=5, max_completion_tokens=4), "min_tokens"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
async def test_chats(body: dict[str, Any], param: str) -> None:
    async with serving() as server:
        check_named(await server.post(CHAT, body), param)
        await settle()
        assert not server.leader.of(AddRequest)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 10_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": 1}, "model"),
        ("/tokenize", b'{"prompt": "\\ud800"}', "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", b'{"tokens": [1, NaN]}', "tokens"),
        ("/detokenize", {"tokens": [1], "model": []}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:50],
)
async def test_wrong_bodies_of_the_tokenizer_routes(path: str, body: Any, param: str) -> None:
    async with serving() as server:
        check_named(await server.post(path, body), param)


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
async def test_fields_that_are_known_but_not_served(field: str) -> None:
    async with serving() as server:
        for path, body, kind in ROUTES:
            if field in kind.__struct_fields__:
                continue
            answer = await server.post(path, {**body, field: "something"})
            assert answer.status == 400
            assert (answer.error["param"], answer.error["code"]) == (field, "unsupported")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat(user("x"), chat_template="{{ 1 }}"), "chat_template"),
        (
            chat({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}),
            "messages.tool_calls",
        ),
        (chat({"role": "assistant", "function_call": {}}), "messages.function_call"),
        (chat({"role": "assistant", "audio": {"id": "a"}}), "messages.audio"),
        (
            chat(user("x"), stream_options={"include_obfuscation": True}),
            "stream_options.include_obfuscation",
        ),
    ],
)
async def test_parts_of_a_conversation_that_are_not_served(
    body: dict[str, Any], field: str
) -> None:
    async with serving() as server:
        answer = await server.post(CHAT, body)
        check_named(answer, field)
        assert answer.error["code"] == "unsupported"


async def test_values_that_ask_for_nothing_are_taken() -> None:
    names = UNSUPPORTED.keys() - CompletionBody.__struct_fields__
    neutral = {name: UNSUPPORTED[name][-1] for name in names}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        for count, fields in enumerate((neutral, dict.fromkeys(names)), start=1):
            asked = tasks.create_task(server.post(COMPLETIONS, {**PROMPT, **fields}))
            added = (await server.leader.added(count))[-1]
            server.leader.answer(added, ids("x"), "length")
            assert (await asked).status == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"best_of": None, "n": 3}, 200),
        ({"best_of": 1}, 200),
        ({"best_of": 1, "n": 3}, 200),
        ({"best_of": 3, "n": 3}, 200),
        ({"best_of": 3}, 400),
        ({"best_of": 3, "n": 2}, 400),
        ({"best_of": 2, "n": 3}, 400),
    ],
)
async def test_best_of_that_chooses_nothing_is_taken(fields: dict[str, Any], status: int) -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(server.post(COMPLETIONS, {**PROMPT, **fields}))
        if status == 200:
            await server.play("a", count=fields.get("n", 1))
            assert len((await asked).json["choices"]) == fields.get("n", 1)
            return
        answer = await asked
        check_named(answer, "best_of")
        assert answer.error["code"] == "unsupported"


@pytest.mark.parametrize("base", [PROMPT, MESSAGES])
@pytest.mark.parametrize("field", ["chat_template", "tools", "documents"])
async def test_what_would_change_a_text_is_refused_when_it_is_counted(
    field: str, base: dict[str, Any]
) -> None:
    """As in a chat: else the number of tokens would be that of another text."""
    async with serving() as server:
        answer = await server.post("/tokenize", {**base, field: ["{{ 1 }}"]})
        check_named(answer, field)
        assert answer.error["code"] == "unsupported"
        assert (await server.post("/tokenize", {**base, field: None})).status == 200


async def test_an_unknown_model_is_not_found() -> None:
    async with serving() as server:
        for path, body in (
            (COMPLETIONS, PROMPT),
            (CHAT, MESSAGES),
            ("/tokenize", PROMPT),
            ("/detokenize", {"tokens": []}),
        ):
            answer = await server.post(path, {**body, "model": "gpt-4"})
            assert (answer.status, answer.error["param"]) == (404, "model")
            assert answer.error["code"] == "model_not_found"


@pytest.mark.parametrize("pin", ["1", "-1", "x", "1.0", "", "9" * 20, "²"])
async def test_pins_to_replicas_that_do_not_exist(pin: str) -> None:
    async with serving() as server:
        answer = await server.post(COMPLETIONS, PROMPT, headers={"X-data-parallel-rank": pin})
        assert answer.status == 400
        assert "X-data-parallel-rank" in answer.error["message"]


async def test_a_context_that_is_too_short_has_its_own_code_and_words() -> None:
    """litellm and langchain-openai see the message alone, and look for these words."""
    async with serving() as server:
        for prompt in ("x" * CONTEXT, [1] * CONTEXT, "x" * 10**5):
            answer = await server.post(COMPLETIONS, {"prompt": prompt})
            assert answer.error["code"] == "context_length_exceeded"
            assert "prompt is too long" in answer.error["message"]
            assert f"this model's maximum context length is {CONTEXT} " in answer.error["message"]
        answer = await server.post(COMPLETIONS, {**PROMPT, "max_tokens": CONTEXT - 4})
        assert answer.error["code"] == "context_length_exceeded"
        assert "prompt is too long" not in answer.error["message"]
        assert f"this model's maximum context length is {CONTEXT} " in answer.error["message"]
