"""Random bodies against tp2·pp2: each is served, or refused with a 4xx that names the field."""

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.golden_rows import check_rows
from support.launching import STORIES, Launch, golden

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

junk = st.sampled_from(
    [None, True, "x", "", -1, 0, 1.5, 10**20, [], {}, [None], {"a": 1}, "\ud800"]
)
token_ids = st.lists(st.integers(-2, 600), max_size=20)
words = st.sampled_from(["Once upon a time", "🙂 größe 日本", " ", "\x00", "the " * 600, "<s>"])
numbers = st.sampled_from([0, 1, -1, 0.5, 2, -5, 1e-300, 1e308, float("nan"), float("inf")])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": words | token_ids | st.lists(words, max_size=3) | st.lists(token_ids, max_size=3),
    "temperature": numbers,
    "top_p": numbers,
    "top_k": st.integers(-5, 600),
    "min_p": numbers,
    "n": st.integers(0, 3),
    "seed": st.integers(-(2**64), 2**64),
    "stop": words | st.lists(words, max_size=18),
    "stop_token_ids": token_ids,
    "logprobs": st.integers(-1, 25),
    "prompt_logprobs": st.integers(-1, 25),
    "presence_penalty": numbers,
    "frequency_penalty": numbers,
    "repetition_penalty": numbers,
    "logit_bias": st.dictionaries(st.sampled_from(["1", "511", "512", "-1", "a"]), numbers),
    "min_tokens": st.integers(-1, 10),
    "ignore_eos": st.booleans(),
    "model": st.sampled_from(["stories260k", "gpt-x"]),
    "priority": st.integers(-(2**40), 2**40),
    "echo": st.booleans(),
    "max_tokens": st.sampled_from([-1, 0, 1, 3, 12, 512, 2**31]),
    "suffix": st.sampled_from(["", "x"]),
    "best_of": st.integers(0, 2),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "user": words,
    "metadata": st.dictionaries(words, words, max_size=2),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "cache_salt": words,
    "whatever": st.integers(),
}
CHAT_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "tool", ""]), "content": words | junk},
            optional={"tool_calls": junk, "name": words, "audio": junk},
        ),
        max_size=3,
    ),
    "max_completion_tokens": st.sampled_from([-1, 0, 1, 3]),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-1, 25),
    "tools": st.lists(junk, max_size=1),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function"}]),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["messages", "x"]), junk, max_size=2),
}
LITERALS = [
    *(b"0", b"1", b"-0", b"1.0", b"1e0", b"1e999", b"-1e-999", b"9" * 5000, b"0.1" + b"1" * 5000),
    *(b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"false", b"", b"nul", b"01", b"0x1"),
    *(b'""', b'"x"', b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b'"\xff"', b'"\n"', b'"'),
    *(b"[]", b"[1]", b"[1,]", b"[[1]]", b"[" * 3000 + b"]" * 3000, b"[" * 3000),
    *(b"{}", b'{"a":1,"a":2}', b'{"1":NaN}', b'{"a":' * 3000 + b"1" + b"}" * 3000, b"{1:1}"),
]
"""Values as clients may write them, right and wrong."""
NAMES = ["prompt", "messages", "n", "temperature", "stop", "logit_bias", "tools", "stream", "novel"]


GOOD: dict[str, Any] = {"prompt": [1, 403, 407], "max_tokens": 6}
GOOD_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 6}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NO_FIELD = {
    b"[" * 100_000: "the body: Expected `object`",
    b'{"prompt": [1]': "not valid JSON",
    b"{\xff": "not valid JSON",
    b'{"prompt": [1], "novel": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
    b'{"prompt": "' + b"x" * 10_000_000 + b'"}': "larger than 8388608 bytes",
}
"""Bodies in which no field is at fault: they are no JSON, no object, too deep or too large."""


@st.composite
def replacements(draw: st.DrawFn, path: str = COMPLETIONS) -> dict[str, Any]:
    """Up to three fields of a good body, with new values: so both answers are common."""
    fields = FIELDS
    if path == CHAT:
        others = {name: values for name, values in FIELDS.items() if name != "prompt"}
        fields = {**others, **CHAT_FIELDS}
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    return {name: draw(fields[name] | junk) for name in names}


@st.composite
def odd_bodies(draw: st.DrawFn) -> bytes:
    """Fields that may come twice, with values that may not be JSON."""
    base = draw(st.sampled_from([GOOD, GOOD_CHAT]))
    pairs = [json.dumps(name).encode() + b":" + json.dumps(base[name]).encode() for name in base]
    for _ in range(draw(st.integers(1, 3))):
        name = json.dumps(draw(st.sampled_from(NAMES))).encode()
        pairs.append(name + b":" + draw(st.sampled_from(LITERALS)))
    return b"{" + b",".join(draw(st.permutations(pairs))) + b"}"


statuses: Counter[int] = Counter()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Launch("--model", str(STORIES), "-tp", "2", "-pp", "2", num_ranks=4) as launch:
        yield launch.wait_ready()


bounded = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@bounded
@given(replaced=replacements())
def test_served_or_refused(url: str, replaced: dict[str, Any]) -> None:
    """The field that a refusal names is one of those that were replaced."""
    status, param = check_answer(url, json.dumps({**GOOD, **replaced}).encode())
    statuses[status] += 1
    assert status == 200 or param in replaced


@bounded
@given(replaced=replacements(CHAT))
def test_chats_are_served_or_refused(url: str, replaced: dict[str, Any]) -> None:
    body = json.dumps({**GOOD_CHAT, **replaced}).encode()
    status, param = check_answer(url, body, CHAT)
    statuses[status] += 1
    assert status == 200 or param in replaced


@bounded
@given(body=odd_bodies(), path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]))
def test_odd_bodies(url: str, body: bytes, path: str) -> None:
    """Wrong numbers, surrogates, names that come twice, values that are deep: a 4xx, or served."""
    status, answer = send(urllib.request.Request(f"{url}{path}", body))
    assert status in (200, 400), answer
    if status == 400:
        assert answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("first", "second", "status"),
    [(b"2", b"1", 200), (b"1", b'"x"', 400), (b'"x"', b"1", 400), (b"NaN", b"1", 400)],
)
def test_the_last_of_two_values_counts_and_both_are_checked(
    url: str, path: str, first: bytes, second: bytes, status: int
) -> None:
    good = json.dumps(GOOD if path == COMPLETIONS else GOOD_CHAT).encode()
    body = good[:-1] + b',"n":' + first + b',"n":' + second + b"}"
    found, answer = send(urllib.request.Request(f"{url}{path}", body))
    assert found == status
    assert status == 400 or len(answer["choices"]) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"prompt": [1], "temperature": NaN}', "temperature"),
        (b'{"prompt": [1], "temperature": Infinity}', "temperature"),
        (b'{"prompt": [1], "temperature": -Infinity}', "temperature"),
        (b'{"prompt": [1], "temperature": -1}', "temperature"),
        (b'{"prompt": [1], "temperature": 1e999}', "temperature"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "\xff"}', "prompt"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "prompt"),
        (b'{"prompt": ["a"' + b', "a"' * 19_999 + b"]}", "prompt"),
        (b'{"prompt": [' + b"1," * 600 + b"1]}", "prompt"),
        (b'{"prompt": [1], "max_tokens": 512}', "max_tokens"),
        (b'{"prompt": [1], "logit_bias": {"99999": 1}}', "logit_bias"),
        (b'{"prompt": [1], "stop": ["a", 1]}', "stop"),
        (b'{"prompt": [1], "top_p": 0}', "top_p"),
        (b'{"prompt": [1], "top_k": -5}', "top_k"),
        (b'{"prompt": [1], "n": 0}', "n"),
        (b'{"prompt": [99999]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [1], "model": "gpt-x"}', "model"),
        (b"{}", "prompt"),
    ],
    ids=lambda value: value[:50].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_refused(url: str, body: bytes, field: str) -> None:
    status, param = check_answer(url, body)
    assert (status, param) == (404 if field == "model" else 400, field)


@pytest.mark.parametrize("body", NO_FIELD, ids=lambda body: body[:30].decode(errors="replace"))
def test_refused_without_a_field(url: str, body: bytes) -> None:
    status, answer = send(urllib.request.Request(f"{url}/v1/completions", body))
    assert status in (400, 413)
    assert answer["error"]["param"] is None
    assert NO_FIELD[body] in answer["error"]["message"]


def test_an_empty_prompt_is_its_bos_token(url: str) -> None:
    assert check_answer(url, b'{"prompt": ""}') == (200, None)


async def test_golden_rows_are_right_at_the_end(url: str) -> None:
    assert min(statuses[200], statuses[400]) > 50, "the bodies above were all of one kind"
    await check_rows(url, golden("stories260k_greedy"))


def check_answer(url: str, body: bytes, path: str = COMPLETIONS) -> tuple[int, str | None]:
    """The status, and the field that a refusal names."""
    status, answer = send(urllib.request.Request(f"{url}{path}", body))
    if status == 200:
        assert answer["choices"]
        assert all(choice["finish_reason"] for choice in answer["choices"])
        return status, None
    assert status in (400, 404), answer
    error = answer["error"]
    assert error["param"] in error["message"]
    return status, error["param"]


def send(request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
            is_stream = "event-stream" in response.headers["Content-Type"]
            return response.status, _last_event(text) if is_stream else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def _last_event(stream: bytes) -> dict[str, Any]:
    *events, done, _ = stream.split(b"\n\n")
    assert done == b"data: [DONE]"
    event: dict[str, Any] = json.loads(events[-1].removeprefix(b"data: "))
    return event
