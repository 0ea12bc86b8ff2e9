"""Random bodies against tp2·pp2: each is served, or refused with a 4xx that says why."""

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
    "whatever": st.integers(),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A good body with up to three fields replaced: so both answers are common."""
    body: dict[str, Any] = {"prompt": [1, 403, 407], "max_tokens": draw(st.integers(1, 6))}
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True)):
        body[name] = draw(FIELDS[name] | junk)
    return body


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
@given(body=bodies())
def test_served_or_refused(url: str, body: dict[str, Any]) -> None:
    statuses[check_answer(url, json.dumps(body).encode())] += 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [1], "temperature": NaN}',
        b'{"prompt": [1], "temperature": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "' + b"x" * 10_000_000 + b'"}',
        b'{"prompt": ["a"' + b', "a"' * 19_999 + b"]}",
        b'{"prompt": [' + b"1," * 600 + b"1]}",
        b'{"prompt": [1], "logit_bias": {"99999": 1}}',
        b'{"prompt": [1], "top_p": 0}',
        b'{"prompt": [1], "top_k": -5}',
        b'{"prompt": [1], "n": 0}',
        b'{"prompt": [99999]}',
        b'{"prompt": [-1]}',
        b'{"prompt": ""}',
        b'{"prompt": []}',
    ],
    ids=lambda body: body[:40].decode(),
)
def test_refused(url: str, body: bytes) -> None:
    assert check_answer(url, body) in (400, 413) or body == b'{"prompt": ""}'


async def test_golden_rows_are_right_at_the_end(url: str) -> None:
    assert min(statuses[200], statuses[400]) > 50, "the bodies above were all of one kind"
    await check_rows(url, golden("stories260k_greedy"))


def check_answer(url: str, body: bytes) -> int:
    status, answer = send(urllib.request.Request(f"{url}/v1/completions", body))
    if status == 200:
        assert answer["choices"]
        assert all(choice["finish_reason"] for choice in answer["choices"])
    else:
        assert 400 <= status < 500, answer
        assert answer["error"]["message"]
    return status


def send(request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
