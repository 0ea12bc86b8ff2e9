"""JavaScript clients, as released, against tp2·pp2 with the default model: the `openai` package,
and the AI SDK (`ai`) with its provider for compatible servers."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client_packages import JsClient
from support.launching import STORIES, Launch

pytestmark = pytest.mark.clients

OPENAI = ("openai@7.59.0",)
AI_SDK = ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92")
KEY = "sesame"
MAX_REQUESTS = 8
FLAGS = ("-tp", "2", "-pp", "2", "--api-key", KEY, "--max-concurrent-requests", str(MAX_REQUESTS))
RETRY_AFTER_S = 5

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
QUESTION = [{"role": "user", "content": "What is gravity?"}]
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": QUESTION},
    "completions": {"prompt": "The capital of France is"},
}
LONG = {"messages": QUESTION, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
GREEDY = {"max_tokens": 16, "temperature": 0}
DRAWN = {"max_tokens": 16, "temperature": 1.0, "seed": 7}
CASES = {
    # What is asked of both routes, and of one
    "greedy": ("chat completions", GREEDY),
    "drawn": ("chat completions", DRAWN),
    "two choices": ("chat completions", {**DRAWN, "n": 2}),
    "nucleus": ("chat completions", {**DRAWN, "top_p": 0.8, "frequency_penalty": 0.5}),
    "stop": ("chat completions", {**GREEDY, "max_tokens": 48, "stop": ["concept in", "city"]}),
    "emoji": ("completions", {**GREEDY, "prompt": "日本 🙂 日本 🙂 日本 🙂 日本"}),
    "logprobs": ("chat", {**GREEDY, "logprobs": True, "top_logprobs": 3}),
    "tokens' logprobs": ("completions", {**GREEDY, "logprobs": 3}),
    "echo": ("completions", {**GREEDY, "logprobs": 1, "echo": True}),
}
ON_ROUTES = [(route, name) for name, (routes, _) in CASES.items() for route in routes.split()]


class Server:
    """Plain HTTP to the launch that the clients talk to."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self._open("/v1/models") as response:
            self.model: str = json.load(response)["data"][0]["id"]

    def whole(self, route: str, body: dict[str, Any]) -> Any:
        with self._open(PATHS[route], {"model": self.model, **body}) as response:
            return json.load(response)

    def rank_pid(self, rank: int) -> int:
        with self._open("/server_info") as response:
            (replica,) = json.load(response)["replicas"]
        pid: int = {found["rank"]: found["pid"] for found in replica["ranks"]}[rank]
        return pid

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers))

    @property
    def fields(self) -> dict[str, str]:
        """What every function of the scripts gets."""
        return {"url": self.url, "apiKey": KEY, "model": self.model}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Launch(*FLAGS, num_ranks=4) as launch:
        yield Server(launch.wait_ready())
        assert "Traceback" not in launch.log


@pytest.fixture(scope="module")
def openai_node(server: Server, tmp_path_factory: pytest.TempPathFactory) -> JsClient:
    folder = tmp_path_factory.mktemp("openai")
    return JsClient("openai_node.mjs", OPENAI, folder, **server.fields)


@pytest.fixture(scope="module")
def ai_sdk(server: Server, tmp_path_factory: pytest.TempPathFactory) -> JsClient:
    return JsClient("ai_sdk.mjs", AI_SDK, tmp_path_factory.mktemp("ai"), **server.fields)


# --- the `openai` package ------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "name"), ON_ROUTES)
def test_whole_and_streamed(openai_node: JsClient, server: Server, route: str, name: str) -> None:
    """Every field is what plain HTTP gets; so is what the events of a stream come to."""
    body = {**PROMPTS[route], **CASES[name][1]}
    wanted = server.whole(route, body)
    assert outcome(openai_node.call("create", route=route, body=body)) == outcome(wanted)
    chunks = openai_node.call("stream", route=route, body=body)
    assert outcome(joined(chunks)) == outcome(wanted)


def outcome(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what is different each time."""
    usage = {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"}
    return {
        "model": answer["model"],
        "choices": [without_nulls(choice) for choice in answer["choices"]],
        "usage": usage,
    }


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return value


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a stream's events make."""
    choices: dict[int, dict[str, Any]] = {}
    *parts, last = chunks
    assert last["choices"] == []
    for part in parts:
        for found in part["choices"]:
            found["message"] = found.pop("delta", None)
            choices[found["index"]] = extended(choices.get(found["index"]), found)
    return {**last, "choices": [choices[index] for index in sorted(choices)]}


def extended(whole: Any, part: Any) -> Any:
    if whole is None or part is None:
        return part if whole is None else whole
    if isinstance(whole, dict):
        return {key: extended(whole.get(key), part.get(key)) for key in {**whole, **part}}
    return whole + part if isinstance(whole, str | list) else part


def test_the_helper_that_puts_chunks_together(openai_node: JsClient, server: Server) -> None:
    body = {**PROMPTS["chat"], **CASES["logprobs"][1]}
    found = openai_node.call("streamHelper", body=body)
    wanted = server.whole("chat", body)
    assert outcome(found["completion"]) == outcome(wanted)
    text = wanted["choices"][0]["message"]["content"]
    assert found["content"] == "".join(found["deltas"]) == text
    assert found["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]


def test_answers_go_back_as_messages(openai_node: JsClient, server: Server) -> None:
    """Users append what they got, whole or put together from chunks, and ask on."""
    body = {**PROMPTS["chat"], **GREEDY}
    wanted = server.whole("chat", followed_up(server.whole("chat", body)))
    whole = openai_node.call("create", route="chat", body=body)
    streamed = openai_node.call("streamHelper", body=body)["completion"]
    for answer in (whole, streamed):
        found = openai_node.call("create", route="chat", body=followed_up(answer))
        assert outcome(found) == outcome(wanted)


def followed_up(answer: dict[str, Any]) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    return {**GREEDY, "messages": [*QUESTION, message, {"role": "user", "content": "Why?"}]}


def test_models(openai_node: JsClient, server: Server) -> None:
    found = openai_node.call("models")
    assert found["listed"] == [server.model]
    assert (found["one"]["id"], found["one"]["object"]) == (server.model, "model")


@pytest.mark.parametrize("route", PATHS)
def test_request_ids(openai_node: JsClient, route: str) -> None:
    body = {**PROMPTS[route], **GREEDY}
    found = openai_node.call("requestIds", route=route, body=body)
    assert found.pop("plain").startswith("req-")
    assert found == {"given": "mine/1", "streamed": "mine/1"}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
FAILURES = {
    # fields of a chat: what the error says
    "bad value": ({"temperature": -1}, 400, "BadRequestError", None, "temperature"),
    "stream": ({"stream": True, "top_p": 2}, 400, "BadRequestError", None, "top_p"),
    "no model": ({"model": "gpt-x"}, 404, "NotFoundError", "model_not_found", "model"),
    "too long": (
        {"max_tokens": 10**6},
        *(400, "BadRequestError", "context_length_exceeded", "max_tokens"),
    ),
    "tools": ({"tools": [TOOL]}, 400, "BadRequestError", "unsupported", "tools"),
    "object": (
        {"response_format": {"type": "json_object"}},
        *(400, "BadRequestError", "unsupported", "response_format"),
    ),
    "picture": (
        {"messages": [{"role": "user", "content": [IMAGE_PART]}]},
        *(400, "BadRequestError", "unsupported", "messages"),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_errors_are_typed(openai_node: JsClient, server: Server, name: str) -> None:
    fields, status, kind, code, param = FAILURES[name]
    body = {**PROMPTS["chat"], "model": server.model, **fields}
    found = openai_node.call("failure", method="chat.completions.create", args=[body])
    assert (found["status"], found["name"]) == (status, kind)
    assert (found.get("code"), found["param"]) == (code, param)
    assert found["message"].startswith(f"{status} ")
    assert param in found["message"]
    assert found["requestID"].startswith("req-")


def test_other_errors(openai_node: JsClient) -> None:
    stranger = openai_node.call("failure", method="models.list", args=[], apiKey="wrong")
    assert (stranger["status"], stranger["name"]) == (401, "AuthenticationError")
    assert stranger["code"] == "invalid_api_key"
    unknown = openai_node.call("failure", method="models.retrieve", args=["gpt-x"])
    assert (unknown["status"], unknown["name"]) == (404, "NotFoundError")
    body = {"model": "any", "input": "Hello"}
    for method in ("embeddings.create", "responses.create"):
        absent = openai_node.call("failure", method=method, args=[body])
        assert (absent["status"], absent["name"]) == (404, "NotFoundError")
        assert "there is no route /v1/" in absent["message"]


@pytest.mark.parametrize("leave", ["break", "signal", "stream"])
def test_leaving_a_stream_ends_its_work(openai_node: JsClient, leave: str) -> None:
    """The function returns once the server computes nothing more."""
    found = openai_node.call("leaveStream", leave=leave, route="chat", body=LONG)
    assert found == {"ran": 1, "aborted": 1}


def test_a_time_out_ends_its_work(openai_node: JsClient) -> None:
    found = openai_node.call("timeOut", route="chat", body=LONG)
    assert found == {"name": "APIConnectionTimeoutError", "aborted": 1}


def test_a_refused_request_is_repeated_when_the_server_says(
    openai_node: JsClient, server: Server
) -> None:
    body = {**PROMPTS["chat"], **GREEDY}
    filling = {**LONG, "n": MAX_REQUESTS}
    found = openai_node.call("retry", route="chat", body=body, filling=filling)
    assert outcome(found["answer"]) == outcome(server.whole("chat", body))
    assert found["statuses"] == [503, 200]
    assert found["waitedMs"] >= RETRY_AFTER_S * 1000


# --- the AI SDK ----------------------------------------------------------------------------------

MESSAGES = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " gravity?"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "It pulls."}]},
    {"role": "user", "content": "Tell me more."},
]
SETTINGS = {
    # settings of the SDK, and the fields of a body that they stand for
    "greedy": (
        {"prompt": "What is gravity?", "temperature": 0, "maxOutputTokens": 16},
        {"messages": QUESTION, "temperature": 0, "max_tokens": 16},
    ),
    "drawn": (
        {
            "prompt": "What is gravity?",
            "temperature": 1,
            "topP": 0.8,
            "seed": 7,
            "maxOutputTokens": 16,
            "presencePenalty": 0.5,
            "frequencyPenalty": 0.5,
        },
        {
            "messages": QUESTION,
            "temperature": 1,
            "top_p": 0.8,
            "seed": 7,
            "max_tokens": 16,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        },
    ),
    "stop": (
        {"prompt": "What is gravity?", "temperature": 0, "stopSequences": ["concept in"]},
        {"messages": QUESTION, "temperature": 0, "stop": ["concept in"]},
    ),
    "conversation": (
        {
            "instructions": "You are brief.",
            "messages": MESSAGES,
            "temperature": 0,
            "maxOutputTokens": 16,
        },
        {
            "messages": [{"role": "system", "content": "You are brief."}, *MESSAGES],
            "temperature": 0,
            "max_tokens": 16,
        },
    ),
    "extras of the server": (
        {
            "prompt": "What is gravity?",
            "temperature": 1,
            "seed": 7,
            "maxOutputTokens": 16,
            "providerOptions": {"aioengine": {"top_k": 3, "min_tokens": 16, "user": "me"}},
        },
        {
            "messages": QUESTION,
            "temperature": 1,
            "seed": 7,
            "max_tokens": 16,
            "top_k": 3,
            "min_tokens": 16,
        },
    ),
}
COMPLETION = {"prompt": "user:\nWhat is gravity?\n\nassistant:\n", "stop": ["\nuser:"]}
"""What the SDK makes of a prompt for the completions route."""


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("function", ["generate", "stream"])
def test_generated_text(ai_sdk: JsClient, server: Server, function: str, name: str) -> None:
    settings, body = SETTINGS[name]
    wanted = server.whole("chat", body)
    result = ai_sdk.call(function, settings=settings)
    check_result(result, wanted)
    assert result["warnings"] == []  # all settings were sent


@pytest.mark.parametrize("function", ["generate", "stream"])
def test_completion_models(ai_sdk: JsClient, server: Server, function: str) -> None:
    settings, body = SETTINGS["greedy"]
    body = {k: v for k, v in body.items() if k != "messages"}
    wanted = server.whole("completions", {**body, **COMPLETION})
    check_result(ai_sdk.call(function, kind="completion", settings=settings), wanted)


def check_result(result: dict[str, Any], wanted: dict[str, Any]) -> None:
    (choice,) = wanted["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert text
    assert result["text"] == text
    assert result["finishReason"] == choice["finish_reason"]
    assert result["model"] == wanted["model"]
    usage = wanted["usage"]
    assert result["usage"]["inputTokens"] == usage["prompt_tokens"]
    assert result["usage"]["outputTokens"] == usage["completion_tokens"]
    if "deltas" in result:
        assert len(result["deltas"]) > 1
        assert "".join(result["deltas"]) == text


PICTURE = {"role": "user", "content": [{"type": "image", "image": "iVBORw0KGgo="}]}
REFUSALS = {
    # what is asked: status, code, param
    "bad value": ({"settings": {"temperature": -1}}, 400, None, "temperature"),
    "tools": ({"asking": "tools"}, 400, "unsupported", "tools"),
    "object": ({"asking": "object"}, 400, "unsupported", "response_format"),
    "schema": (
        {"asking": "object", "options": {"supportsStructuredOutputs": True}},
        *(400, "unsupported", "response_format"),
    ),
    "picture": ({"settings": {"prompt": [PICTURE]}}, 400, "unsupported", "messages"),
    "no model": ({"model": "gpt-x"}, 404, "model_not_found", "model"),
    "no key": ({"apiKey": "wrong"}, 401, "invalid_api_key", None),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("function", ["failure", "streamFailure"])
def test_api_call_errors(ai_sdk: JsClient, function: str, name: str) -> None:
    fields, status, code, param = REFUSALS[name]
    found = ai_sdk.call(function, **fields)
    assert (found["name"], found["statusCode"]) == ("AI_APICallError", status)
    assert found["isRetryable"] is False
    error = found["data"]["error"]
    assert found["message"] == error["message"]
    assert (error["code"], error["param"]) == (code, param)
    assert param is None or param in error["message"]
    assert found["requestId"].startswith("req-")


def test_there_are_no_embeddings(ai_sdk: JsClient) -> None:
    found = ai_sdk.call("embedding")
    assert (found["name"], found["statusCode"]) == ("AI_APICallError", 404)
    assert found["message"] == "there is no route /v1/embeddings"


def test_aborting_a_stream_ends_its_work(ai_sdk: JsClient) -> None:
    settings = {
        "prompt": "What is gravity?",
        "maxOutputTokens": LONG["max_tokens"],
        "providerOptions": {"aioengine": {"ignore_eos": True}},
    }
    found = ai_sdk.call("leaveStream", settings=settings)
    assert found == {"ran": 1, "aborted": 1, "last": "abort"}


def test_the_sdk_repeats_what_was_refused(ai_sdk: JsClient, server: Server) -> None:
    settings, body = SETTINGS["greedy"]
    found = ai_sdk.call("retry", settings=settings, filling={**LONG, "n": MAX_REQUESTS})
    assert found["text"] == server.whole("chat", body)["choices"][0]["message"]["content"]
    assert found["statuses"] == [503, 200]
    assert found["waitedMs"] >= RETRY_AFTER_S * 1000


# --- both ----------------------------------------------------------------------------------------

PROMPT = "Once upon a time"
ENDLESS = {"max_tokens": 400, "ignore_eos": True, "temperature": 1}
BREAKING = {
    "openai": (
        *("openai_node.mjs", OPENAI),
        {"route": "completions", "body": {"prompt": PROMPT, **ENDLESS}},
    ),
    "ai": (
        *("ai_sdk.mjs", AI_SDK),
        {
            "kind": "completion",
            "settings": {"prompt": PROMPT, "providerOptions": {"aioengine": ENDLESS}},
        },
    ),
}


@pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")
@pytest.mark.parametrize("client", BREAKING)
def test_a_stream_that_breaks_says_why(tmp_path: Path, client: str) -> None:
    """A rank is killed in the middle of an answer; the user sees the cause, not a short answer."""
    script, packages, fields = BREAKING[client]
    flags = ("--model", str(STORIES), "-tp", "2", "--api-key", KEY)
    with Launch(*flags, num_ranks=2) as launch:
        server = Server(launch.wait_ready())
        pid = server.rank_pid(1)
        js = JsClient(script, packages, tmp_path, **server.fields)
        process = js.start("broken", **fields)
        assert process.stdout is not None
        assert process.stdout.readline() == "streaming\n"
        os.kill(pid, signal.SIGKILL)
        found = js.result(process)
    assert found["type"] == "service_unavailable_error"
    assert found["message"].startswith("rank 1 (dp0 pp0 tp1)")
    assert "SIGKILL" in found["message"]
    assert found.get("finishReason", "error") == "error"
