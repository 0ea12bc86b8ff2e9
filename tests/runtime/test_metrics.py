"""/metrics in front of fake leaders: what is counted when, and in which form it is told."""

import asyncio
import re
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.exposition import Samples, samples
from support.fake_leaders import FakeLeader, front_end_with_leaders, sample
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, Served, serving
from support.mailbox import settle
from support.raw_http import connected
from support.tiny_model import detokenizer, ids

from aioengine.api.sse import EventStream
from aioengine.control.walltime import Walltime
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.metrics import ANSWER_BUCKETS_S, LENGTH_BUCKETS, TOKEN_BUCKETS_S, Tally
from aioengine.frontend.records import ChoiceSpec
from aioengine.messages import ChoiceParams, LoadStats, RequestDelta, StepReport

SCRAPE = "/metrics"
STREAMED = {**PROMPT, "stream": True}


async def scrape(server: Served) -> Samples:
    return samples((await server.get(SCRAPE)).text)


def changed(before: Samples, after: Samples, name: str) -> dict[str, float]:
    """By the values of the labels."""
    return {
        " ".join(dict(labels).values()): value - before[family, labels]
        for (family, labels), value in after.items()
        if family == f"aioengine:{name}" and value != before[family, labels]
    }


def spec(prompt: str = "abc", *stop: str, choice_index: int = 0, **fields: Any) -> ChoiceSpec:
    params = ChoiceParams(max_tokens=50, choice_index=choice_index)
    return ChoiceSpec(
        prompt_ids=ids(prompt), params=params, detokenizer=detokenizer(*stop), **fields
    )


async def ready(num_replicas: int = 1) -> tuple[FrontEnd, list[FakeLeader]]:
    front_end, leaders = front_end_with_leaders(num_replicas)
    for leader in leaders:
        leader.ready()
    await settle()
    return front_end, leaders


# --- buckets -------------------------------------------------------------------------------------


def test_a_value_belongs_to_the_first_bucket_that_holds_it() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5):
        tally.observe(value)
    assert tally._counts == [2, 2, 1]


@pytest.mark.parametrize("bounds", [TOKEN_BUCKETS_S, ANSWER_BUCKETS_S, LENGTH_BUCKETS])
def test_buckets_are_sorted_and_not_far_from_each_other(bounds: tuple[float, ...]) -> None:
    """An interpolated quantile is wrong by less than a bucket."""
    ratios = [high / low for low, high in pairwise(bounds)]
    assert all(1 < ratio <= 4 for ratio in ratios)


# --- what a replica counts -----------------------------------------------------------------------


async def test_choices_of_a_prompt_count_it_once() -> None:
    """As usage.prompt_tokens does."""
    front_end, (leader, other) = await ready(2)
    front_end.generate([spec("abcd"), spec("abcd", choice_index=1), spec("xy")])
    await leader.added(2)
    await other.added(1)
    engines = ("0", "1")
    for name, wanted in (("prompt_tokens_total", 6), ("request_prompt_tokens_sum", 6)):
        assert sum(sample(front_end, name, engine=engine) or 0 for engine in engines) == wanted
    front_end.end_streams("over")


async def test_only_tokens_of_the_answer_count() -> None:
    """What a step brought beyond a stop string, or drew where nothing was asked for, is none."""
    front_end, (leader,) = await ready()
    front_end.generate([spec("a", "XY"), spec("b", asked_tokens=0), spec("c")])
    stopping, scored, plain = await leader.added(3)
    leader.answer(stopping, ids("o"))
    leader.answer(stopping, ids("kXYzz"))
    leader.answer(scored, ids("q"), "length")
    leader.answer(plain, ids("rs"), "length")
    await settle()
    assert sample(front_end, "generation_tokens_total", engine="0") == 1 + 3 + 0 + 2
    assert sample(front_end, "request_generation_tokens_sum", engine="0") == 6
    assert sample(front_end, "request_generation_tokens_count", engine="0") == 3
    assert sample(front_end, "time_to_first_token_seconds_count", engine="0") == 2
    assert sample(front_end, "inter_token_latency_seconds_count", engine="0") == 3


async def test_the_parts_of_a_request_add_up() -> None:
    """Queue, prefill and decode; tokens of one step share its time."""
    front_end, (leader,) = await ready()
    async with front_end.generate([spec()]):
        (added,) = await leader.added()
        for tokens, reason in (("", None), ("a", None), ("bcd", None), ("e", "length")):
            admitted = () if tokens else (added.request_id, "nobody's")
            delta = RequestDelta(added.request_id, ids(tokens), finish_reason=reason)
            leader.send(StepReport((delta,), LoadStats(), admitted))
            await settle()
    figures = {
        name: sample(front_end, f"{name}_sum", engine="0")
        for name in (
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "request_time_per_output_token_seconds",
        )
    }
    queue, prefill, decode, ttft, inter_token, e2e, per_token = figures.values()
    assert min(queue, prefill, decode) > 0
    assert queue + prefill == pytest.approx(ttft)
    assert inter_token == pytest.approx(decode)
    assert per_token == pytest.approx(decode / 4)
    assert ttft + decode == pytest.approx(e2e, abs=0.1)
    assert sample(front_end, "inter_token_latency_seconds_count", engine="0") == 4


async def test_who_leaves_while_waiting_was_never_in_a_slot() -> None:
    front_end, (leader,) = await ready()
    async with front_end.generate([spec()]):
        (added,) = await leader.added()
        leader.report(num_waiting=1)
        await settle()
        assert sample(front_end, "num_requests_waiting", engine="0") == 1
    await leader.aborted()
    leader.send(StepReport((), LoadStats(), (added.request_id,)))  # crossed the abort
    await settle()
    assert sample(front_end, "num_requests_waiting", engine="0") == 0
    assert sample(front_end, "request_queue_time_seconds_count", engine="0") == 0
    assert sample(front_end, "request_decode_time_seconds_count", engine="0") == 0
    assert sample(front_end, "e2e_request_latency_seconds_count", engine="0") == 1
    labels = {"engine": "0", "finished_reason": "abort"}
    assert sample(front_end, "request_success_total", **labels) == 1


async def test_health_and_states_say_one_thing_at_a_time() -> None:
    front_end, (first, second) = front_end_with_leaders(2)

    def told() -> tuple[list[str], list[list[str]]]:
        states = ("starting", "ready", "failed")
        return (
            [
                health
                for health in ("starting", "ok", "degraded", "draining", "failed")
                if sample(front_end, "health", state=health)
            ],
            [
                [s for s in states if sample(front_end, "replica_state", engine=rank, state=s)]
                for rank in ("0", "1")
            ],
        )

    assert told() == (["starting"], [["starting"], ["starting"]])
    for leader in (first, second):
        leader.ready()
    await settle()
    assert told() == (["ok"], [["ready"], ["ready"]])
    second.fail("its cause")
    await settle()
    assert told() == (["degraded"], [["ready"], ["failed"]])
    front_end.begin_drain()
    assert told() == (["draining"], [["ready"], ["failed"]])


# --- HTTP ----------------------------------------------------------------------------------------


async def test_requests_by_route_and_status() -> None:
    async with serving(root_path="/llm", api_key=("key",)) as server:
        headers = {"Authorization": "Bearer key"}
        before = await scrape_at(server, "/llm/metrics")
        for path in ("/llm/v1/models", "/llm/v1/models/absent", "/llm/nowhere", "/v1/models"):
            await server.get(path, headers=headers)
        await server.get("/llm/v1/models")
        await server.ask("HEAD", "/llm/livez")
        await server.ask("DELETE", "/llm/livez", headers=headers)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(
                server.post(f"/llm{COMPLETIONS}", {**PROMPT, "max_tokens": 1}, headers=headers)
            )
            await server.play("x")
        assert asked.result().status == 200
        after = await scrape_at(server, "/llm/metrics")
    assert changed(before, after, "http_requests_total") == {
        "/v1/models 2xx": 1,
        "/v1/models 4xx": 1,
        "/v1/models/{name} 4xx": 1,
        "other 4xx": 3,
        "/livez 2xx": 1,
        "/metrics 2xx": 1,
        "/v1/completions 2xx": 1,
    }


async def scrape_at(server: Served, path: str) -> Samples:
    return samples((await server.get(path)).text)


async def test_a_client_that_leaves_has_no_status() -> None:
    async with serving() as server:
        before = await scrape(server)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(server.post(COMPLETIONS, {**PROMPT, "max_tokens": 9}))
            await server.leader.added()
            assert changed(before, await scrape(server), "http_requests_in_progress") == {"": 1}
            asked.cancel()
        await server.leader.aborted()
        after = await scrape(server)
    assert changed(before, after, "http_requests_total")["/v1/completions left"] == 1
    assert changed(before, after, "http_requests_in_progress") == {}


async def refusals(server: Served, *bodies: Any, path: str = COMPLETIONS) -> dict[str, float]:
    before = await scrape(server)
    for body in bodies:
        assert (await server.post(path, body)).status == 503
    return changed(before, await scrape(server), "http_requests_refused_total")


async def test_refusals_by_reason() -> None:
    async with serving(states=("starting",)) as server:
        assert await refusals(server, PROMPT, {}) == {"starting": 2}
    async with serving(states=("failed",)) as server:
        assert await refusals(server, MESSAGES, path=CHAT) == {"failed": 1}
    async with serving(max_concurrent_requests=2) as server:
        assert await refusals(server, {**PROMPT, "n": 3}) == {"overloaded": 1}
        server.front_end.begin_drain()
        assert await refusals(server, PROMPT) == {"draining": 1}
    async with serving(walltime=Walltime(1000.0, 0.0, lambda: 965.0)) as server:
        server.front_end.metrics.pace.first_token(1.0)
        server.front_end.metrics.pace.next_tokens(1, 1.0)
        assert await refusals(server, {**PROMPT, "max_tokens": 50}) == {"walltime": 1}
    async with serving(states=("ready", "failed")) as server:
        before = await scrape(server)
        headers = {"X-data-parallel-rank": "1"}
        assert (await server.post(COMPLETIONS, PROMPT, headers=headers)).error["code"] == "failed"
        after = await scrape(server)
        assert changed(before, after, "http_requests_refused_total") == {"failed": 1}
        assert changed(before, after, "prompt_tokens_total") == {}
        assert changed(before, after, "request_success_total") == {}


async def test_a_failure_is_no_refusal() -> None:
    async with serving() as server:
        before = await scrape(server)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(server.post(COMPLETIONS, PROMPT))
            (added,) = await server.leader.added()
            server.leader.answer(added, (), "error", error="NaN")
        assert asked.result().status == 503
        after = await scrape(server)
    assert changed(before, after, "http_requests_refused_total") == {}
    assert changed(before, after, "request_success_total") == {"0 error": 1}


async def test_a_slow_reader_is_one_while_it_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    drains: asyncio.Queue[None] = asyncio.Queue()
    drain = EventStream.drain

    async def seen(self: EventStream) -> None:
        drains.put_nowait(None)
        await drain(self)

    monkeypatch.setattr(EventStream, "drain", seen)
    async with serving() as server:
        async with connected(server.url) as (reader, writer):
            body = b'{"prompt": "hello", "stream": true, "return_token_ids": true}'
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            (added,) = await server.leader.added()
            while drains.empty():
                server.leader.answer(added, ids("x" * 20_000))
                await settle()
            before = await scrape(server)
            assert before["aioengine:http_slow_readers", ()] == 1
            server.leader.answer(added, ids("x"), "length")
            end = b""
            while not end.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                end = (end + await reader.read(2**16))[-64:]
        assert (await scrape(server))["aioengine:http_slow_readers", ()] == 0


# --- the form ------------------------------------------------------------------------------------


async def test_the_form_is_text_whatever_is_asked_for() -> None:
    """Names keep their colon, of which OpenMetrics by prometheus_client makes an underscore."""
    accepted = (
        "*/*",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,*/*;q=0.1",
        "application/openmetrics-text;version=\xff;escaping=x",
        "text/html",
    )
    async with serving(states=("ready", "failed")) as server:
        for accept in accepted:
            answer = await server.get(SCRAPE, headers={"Accept": accept})
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            found = samples(answer.text)
            assert ("aioengine:num_requests_running", (("engine", "1"),)) in found
            assert found["process_resident_memory_bytes", ()] > 2**20
        head = await server.ask("HEAD", SCRAPE)
        assert (head.status, head.text) == (200, "")
        assert int(head.headers["Content-Length"]) > 10_000


async def test_every_metric_says_what_it_is() -> None:
    async with serving() as server:
        text = (await server.get(SCRAPE)).text
    for family in text_string_to_metric_families(text):
        assert family.type in ("gauge", "counter", "histogram"), family
        assert family.documentation.endswith(".")
    names = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(names) == len({*names}) > 30


async def test_every_series_exists_from_the_start() -> None:
    """None comes or goes with requests, refusals and failures: rates and ratios have no gaps."""
    async with serving(states=("starting", "starting")) as server:
        before = await scrape(server)
        for leader in server.leaders:
            leader.ready()
        await settle()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.post(COMPLETIONS, {**STREAMED, "max_tokens": 1}))
            await server.play("x")
        server.leaders[1].fail("its cause")
        await settle()
        after = await scrape(server)
    assert before.keys() == after.keys()
    assert all(name.startswith(("aioengine:", "process_")) for name, _ in after)


async def test_the_collector_of_an_application_is_its_own() -> None:
    async with serving() as one, serving() as other:
        await one.get("/nowhere")
        found = [await scrape(server) for server in (one, other)]
    labels = (("handler", "other"), ("status", "4xx"))
    assert [figures["aioengine:http_requests_total", labels] for figures in found] == [1, 0]
