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
    "whatever": st.integers(),
}


GOOD: dict[str, Any] = {"prompt": [1, 403, 407], "max_tokens": 6}
NO_FIELD = {
    b"[" * 100_000: "the body: Expected `object`",
    b'{"prompt": [1]': "not valid JSON",
    b"{\xff": "not valid JSON",
    b'{"prompt": [1], "novel": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
    b'{"prompt": "' + b"x" * 10_000_000 + b'"}': "larger than 8388608 bytes",
}
"""Bodies in which no field is at fault: they are no JSON, no object, too deep or too large."""


@st.composite
def replacements(draw: st.DrawFn) -> dict[str, Any]:
    """Up to three fields of a good body, with new values: so both answers are common."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))
    return {name: draw(FIELDS[name] | junk) for name in names}


statuses: Counter[int] = Counter()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Launch("--model", str(STORIES), "-tp", "2", "-pp", "2", num_ranks=4) as launch:
        yield launch.wait_ready()


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(replaced=replacements())
def test_served_or_refused(url: str, replaced: dict[str, Any]) -> None:
    """The field that a refusal names is one of those that were replaced."""
    status, param = check_answer(url, json.dumps({**GOOD, **replaced}).encode())
    statuses[status] += 1
    assert status == 200 or param in replaced


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


def check_answer(url: str, body: bytes) -> tuple[int, str | None]:
    """The status, and the field that a refusal names."""
    status, answer = send(urllib.request.Request(f"{url}/v1/completions", body))
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
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
