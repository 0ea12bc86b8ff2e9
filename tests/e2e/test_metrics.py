"""/metrics of a real launch: equal to what clients were told, true while it is busy, and all that
the dashboard asks for."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.dashboards import Series, queries
from support.exposition import Samples, samples
from support.launching import END_S, STORIES, Launch, post, stream

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

LIMIT = 64
NUM_SLOTS = 4
FLAGS = (
    *("--model", str(STORIES), "--max-num-seqs", str(NUM_SLOTS)),
    *("--max-concurrent-requests", str(LIMIT)),
)
NUM_LEFT = 40
IDLE = {"aioengine:num_preemptions_total"}
"""Of all that the dashboard counts, what this traffic brings nothing of."""


async def test_metrics_and_dashboard() -> None:
    with Launch(*FLAGS, num_ranks=2) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            before = await scrape(session)
            answers = await mixed_traffic(session)
            await refused_traffic(session)
            after = await scrape_until(session, is_idle)
            check_counts(before, after, answers)
            await check_gauges(session, after)
            await check_dashboard(session)


# --- traffic -------------------------------------------------------------------------------------


def mixed_bodies(chance: random.Random) -> list[dict[str, Any]]:
    """Every way to ask for tokens that usage counts differently."""

    def prompt() -> list[int]:
        return [1, *(chance.randrange(3, 512) for _ in range(chance.randrange(1, 40)))]

    variants: list[dict[str, Any]] = [
        {},
        {"n": 3, "temperature": 1.0},
        {"prompt": [prompt(), prompt(), prompt()], "n": 2, "temperature": 0.8},
        {"prompt": "Once upon a time", "stop": ["the", "was", "a"]},
        {"prompt": "Once upon a time", "stop": ["the"], "n": 2, "temperature": 0.9},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"max_tokens": 1, "echo": True, "logprobs": 1},
        {"max_tokens": 1},
        {"logprobs": 2},
        {"prompt": [1] + [7] * 60},
    ]
    return [
        {"prompt": prompt(), "max_tokens": 12, "seed": index, **variant}
        for index, variant in enumerate(variants * 5)
    ]


async def mixed_traffic(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """Usage and finish reasons of each, half of them from streams."""
    chance = random.Random(7)
    at_once = asyncio.Semaphore(8)

    async def ask(body: dict[str, Any], is_streamed: bool) -> dict[str, Any]:
        async with at_once:
            if not is_streamed:
                return await post(session, "/v1/completions", body)
            events = await stream(
                session, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
            )
        ends = [c for event in events for c in event["choices"] if c["finish_reason"]]
        return {"choices": ends, "usage": events[-1]["usage"]}

    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(ask(body, is_streamed))
            for body in mixed_bodies(chance)
            for is_streamed in (False, True)
        ]
    return [task.result() for task in running]


async def refused_traffic(session: aiohttp.ClientSession) -> None:
    for body, status in (
        ({"prompt": "x", "n": LIMIT + 1}, 503),
        ({"prompt": "x", "temperature": -1}, 400),
        ({"prompt": [999_999]}, 400),
        ({"prompt": "x", "model": "another"}, 404),
    ):
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == status, body


@contextlib.asynccontextmanager
async def client_that_leaves(session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """More choices than replica 1 can run at a time, on their way together."""

    async def read() -> None:
        body = {"prompt": [1, 5], "max_tokens": 500, "ignore_eos": True, "n": NUM_LEFT}
        headers = {"X-data-parallel-rank": "1"}
        async with session.post(
            "/v1/completions", json={**body, "stream": True}, headers=headers
        ) as response:
            assert response.status == 200
            async for _ in response.content:
                pass

    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(read())
        yield
        reader.cancel()


# --- what the metrics say ------------------------------------------------------------------------


async def scrape_text(session: aiohttp.ClientSession) -> str:
    async with session.get("/metrics") as response:
        return await response.text()


async def scrape(session: aiohttp.ClientSession) -> Samples:
    return samples(await scrape_text(session))


def of(found: Samples, name: str, **labels: str) -> float:
    """Summed over the series with these labels."""
    return sum(
        value
        for (sample, their_labels), value in found.items()
        if sample == f"aioengine:{name}" and labels.items() <= dict(their_labels).items()
    )


async def scrape_until(
    session: aiohttp.ClientSession, condition: Callable[[Samples], bool]
) -> Samples:
    """A scrape is a round trip to the server, which publishes changes by itself."""
    async with asyncio.timeout(END_S):
        while not condition(found := await scrape(session)):
            pass
    return found


def is_idle(found: Samples) -> bool:
    return not any(
        of(found, name)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


def is_full(found: Samples) -> bool:
    return (
        of(found, "num_requests_running", engine="1") == NUM_SLOTS
        and of(found, "num_requests_waiting", engine="1") > 0
    )


def check_counts(before: Samples, after: Samples, answers: list[dict[str, Any]]) -> None:
    def grown(name: str, **labels: str) -> float:
        return of(after, name, **labels) - of(before, name, **labels)

    usage = Counter[str]()
    for answer in answers:
        usage["prompt"] += answer["usage"]["prompt_tokens"]
        usage["generation"] += answer["usage"]["completion_tokens"]
        usage["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    reasons = Counter(c["finish_reason"] for answer in answers for c in answer["choices"])
    assert min(reasons["stop"], reasons["length"], usage["cached"]) > 0
    assert grown("prompt_tokens_total") == grown("request_prompt_tokens_sum") == usage["prompt"]
    assert grown("generation_tokens_total") == usage["generation"]
    assert grown("request_generation_tokens_sum") == usage["generation"]
    for reason in ("stop", "length", "abort", "error"):
        assert grown("request_success_total", finished_reason=reason) == reasons[reason], reason
    num_choices = sum(reasons.values())
    num_first_tokens = grown("time_to_first_token_seconds_count")
    assert grown("e2e_request_latency_seconds_count") == num_choices
    assert grown("request_queue_time_seconds_count") == num_choices
    assert grown("request_prefill_time_seconds_count") == num_first_tokens < num_choices
    num_gaps = grown("inter_token_latency_seconds_count")
    assert num_gaps + num_first_tokens == usage["generation"]
    assert grown("prefix_cache_hits_total") >= usage["cached"]
    for engine in ("0", "1"):
        assert grown("request_success_total", engine=engine) > num_choices / 4
    posted = {"handler": "/v1/completions"}
    assert grown("http_requests_total", **posted, status="2xx") == len(answers)
    assert grown("http_requests_total", **posted, status="4xx") == 3
    assert grown("http_requests_total", **posted, status="5xx") == 1
    assert grown("http_requests_refused_total", reason="overloaded") == 1
    assert before.keys() == after.keys()


async def check_gauges(session: aiohttp.ClientSession, before: Samples) -> None:
    """One replica is as full as it gets, the other idle; then nobody is left."""
    async with client_that_leaves(session):
        busy = await scrape_until(session, is_full)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert of(busy, name, engine="0") == 0
        assert 0 < of(busy, "kv_cache_usage_perc", engine="1") <= 1
        assert of(busy, "http_requests_in_progress") == 1
    gone = await scrape_until(session, is_idle)
    ended = {
        reason: of(gone, "request_success_total", engine="1", finished_reason=reason)
        - of(before, "request_success_total", engine="1", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended["abort"] > 0
    assert ended["abort"] + ended["length"] == NUM_LEFT
    assert of(gone, "http_requests_total", status="left") == 1
    assert of(gone, "http_requests_in_progress") == 0
    assert before.keys() == gone.keys()


async def check_dashboard(session: aiohttp.ClientSession) -> None:
    text = await scrape_text(session)
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    series = Series(samples(text), types)
    for query in queries():
        try:
            series.check(query)
        except AssertionError as error:
            raise AssertionError(f"{query.panel}: {query.expr}: {error}") from error
    counted = {name for query in queries() for name in query.counters()}
    empty = {name for name in counted if not series.total(name)}
    assert empty == IDLE, "counters that a busy server leaves at zero"
