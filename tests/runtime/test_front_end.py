"""The front end over fake leaders: health, routing, records, and how streams end."""

import asyncio

import pytest
from support.fake_leaders import front_end_with_leaders, sample, serving, spec
from support.mailbox import settle
from support.replicas import info
from support.tiny_model import ids

from aioengine.control.walltime import RESERVE_S, Walltime
from aioengine.errors import RequestFailedError
from aioengine.frontend.front_end import FrontEnd, UnavailableError
from aioengine.frontend.records import Generation, Update
from aioengine.frontend.states import Health
from aioengine.messages import (
    Abort,
    AddRequest,
    DrainRequested,
    Heartbeat,
    RankInfo,
    RequestDelta,
    Shutdown,
)


async def rest(generation: Generation) -> list[Update]:
    """All updates until the end, unmerged."""
    return [update async for updates in generation for update in updates]


# --- health --------------------------------------------------------------------------------------

S, R, F = "starting", "ready", "failed"


@pytest.mark.parametrize(
    ("states", "is_draining", "health"),
    [
        ((S,), False, "starting"),
        ((R,), False, "ok"),
        ((F,), False, "failed"),
        ((S, R), False, "starting"),
        ((R, R), False, "ok"),
        ((R, F), False, "degraded"),
        ((F, R), False, "degraded"),
        ((S, F), False, "starting"),
        ((F, F), False, "failed"),
        ((R,), True, "draining"),
        ((S, R), True, "draining"),
        ((R, F), True, "draining"),
        ((F, F), True, "failed"),
    ],
)
async def test_health(states: tuple[str, ...], is_draining: bool, health: Health) -> None:
    front_end, leaders = front_end_with_leaders(len(states))
    for leader, state in zip(leaders, states, strict=True):
        if state in (R, F):
            leader.ready()
        if state == F:
            leader.fail("its cause")
    await settle()
    if is_draining:
        front_end.begin_drain()
    assert front_end.health == health
    assert front_end.causes == ["its cause"] * states.count(F)
    assert front_end.all_failed.is_set() == (health == "failed")
    if health in ("ok", "degraded"):
        assert front_end.started.is_set()
        front_end.generate([spec()])
    else:
        with pytest.raises(UnavailableError, match="its cause" if health == "failed" else health):
            front_end.generate([spec()])
    front_end.end_streams("over")


async def test_a_replica_may_fail_while_it_starts() -> None:
    front_end, (first, second) = front_end_with_leaders(2)
    first.fail("no memory")
    await settle()
    assert front_end.health == "starting"
    assert not front_end.started.is_set()
    second.ready()
    await settle()
    assert front_end.health == "degraded"
    assert front_end.started.is_set()


async def test_a_lost_leader_is_a_failed_replica() -> None:
    front_end, leaders = await serving(2)
    leaders[1].link.close()
    await settle()
    assert front_end.causes == [f"{info(1)}: connection closed (killed, crashed or unreachable)"]


async def test_the_first_cause_stays() -> None:
    front_end, (leader,) = await serving()
    leader.fail("first")
    leader.fail("second")
    leader.link.close()
    await settle()
    assert front_end.causes == ["first"]


async def test_the_shortest_context_counts() -> None:
    front_end, (first, second) = front_end_with_leaders(2)
    assert front_end.max_model_len is None
    first.ready(max_model_len=300)
    second.ready(max_model_len=200)
    await settle()
    assert front_end.max_model_len == 200


async def test_a_drain_request_of_any_rank_is_seen() -> None:
    front_end, leaders = await serving(2)
    leaders[1].send(DrainRequested(3, for_walltime=True))
    leaders[0].send(DrainRequested(0))
    await front_end.drain_requested.wait()
    await settle()
    assert front_end.drain_is_for_walltime


# --- the end of the job --------------------------------------------------------------------------


async def ending(left_s: float, token_s: float | None) -> FrontEnd:
    """A front end whose job leaves this much time for answers; tokens came at this pace."""
    walltime = Walltime(1000.0 + RESERVE_S, 0.0, lambda: 1000.0 - left_s)
    front_end, (leader,) = front_end_with_leaders(1, walltime=walltime)
    leader.ready()
    await settle()
    if token_s is not None:
        front_end.metrics.pace.first_token(token_s)
        front_end.metrics.pace.next_tokens(1, token_s)
    return front_end


@pytest.mark.parametrize(
    ("asked", "token_s"),
    [(40, 1.0), (1000, 0.01), (1000, None), (None, 10.0)],
    ids=["in time", "quick", "nothing measured", "no max_tokens"],
)
async def test_what_may_end_in_time_is_taken(asked: int | None, token_s: float | None) -> None:
    front_end = await ending(40.0, token_s)
    front_end.generate([spec(), spec(asked_tokens=asked)])
    front_end.end_streams("over")


async def test_what_would_not_end_in_time_is_refused() -> None:
    front_end = await ending(40.0, 1.0)
    with pytest.raises(UnavailableError, match="50 tokens take about 50 s at present, 40 s") as at:
        front_end.generate([spec(), spec(asked_tokens=50)])
    assert at.value.retry_after_s == 40.0 + RESERVE_S
    assert front_end.idle.is_set()


# --- admission -----------------------------------------------------------------------------------


async def test_admission_counts_choices() -> None:
    front_end, (leader,) = await serving(limit=5)
    front_end.generate([spec(), spec(), spec()])
    with pytest.raises(UnavailableError, match="--max-concurrent-requests 5"):
        front_end.generate([spec(), spec(), spec()])
    two = front_end.generate([spec(), spec()])
    with pytest.raises(UnavailableError, match="5 requests are in flight"):
        front_end.generate([spec()])
    async with two:
        pass  # the client leaves
    front_end.generate([spec(), spec()])
    assert front_end.num_live == 5
    added = await leader.added(7)
    assert len({request.request_id for request in added}) == 7


# --- records -------------------------------------------------------------------------------------


async def test_a_request_reaches_the_leader_whole() -> None:
    front_end, (leader,) = await serving()
    front_end.generate([spec("hi", priority=-3, cache_salt="salt")])
    (added,) = await leader.added()
    assert added.token_ids == ids("hi")
    assert (added.params.max_tokens, added.priority, added.cache_salt) == (50, -3, "salt")


async def test_updates_come_as_the_steps_do() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec()]) as generation:
        (added,) = await leader.added()
        for text in ("he", "llo"):
            leader.answer(added, ids(text))
            (update,) = await anext(generation)
            assert (update.text, update.token_ids) == (text, list(ids(text)))
            assert update.finish_reason is None
        leader.answer(added, ids("!"), "length")
        (update,) = await rest(generation)
        assert (update.text, update.finish_reason) == ("!", "length")
        assert front_end.num_live == 0
        assert not front_end.idle.is_set()  # the handler may still be writing
    assert front_end.idle.is_set()
    await settle()
    assert not leader.of(Abort)


async def test_what_a_slow_reader_has_not_read_merges() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec(), spec(), spec()]) as generation:
        added = await leader.added(3)
        for step in range(100):
            for request in added[:2]:
                leader.answer(request, ids(chr(ord("a") + step % 26)))
        leader.answer(added[0], ids("."), "length")
        await settle()
        updates = await anext(generation)
        assert [update.index for update in updates] == [0, 1]
        assert [len(update.token_ids) for update in updates] == [101, 100]
        assert updates[0].text == ("abcdefghijklmnopqrstuvwxyz" * 4)[:100] + "."
        assert [update.finish_reason for update in updates] == ["length", None]
        leader.answer(added[2], ids("late"))
        (update,) = await anext(generation)
        assert (update.index, update.text) == (2, "late")


async def test_characters_split_over_steps_come_whole() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec()]) as generation:
        (added,) = await leader.added()
        for byte in ids("é日"):
            leader.answer(added, (byte,))
        leader.answer(added, ids("日")[:2], "length")
        assert (
            "".join(update.text for update in await rest(generation))
            == "é日\N{REPLACEMENT CHARACTER}"
        )


async def test_a_stop_string_aborts_and_later_deltas_are_ignored() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec(stop=("END",)), spec()]) as generation:
        first, second = await leader.added(2)
        leader.answer(first, ids("some E"))
        leader.answer(first, ids("ND and more"))
        leader.answer(first, ids("even more"))
        leader.answer(first, ids("."), "length")
        leader.answer(second, ids("x"), "length")
        updates = await rest(generation)
    assert await leader.aborted() == [first.request_id]
    assert "".join(u.text for u in updates if u.index == 0) == "some "
    (end,) = (u for u in updates if u.index == 0 and u.finish_reason)
    assert (end.finish_reason, end.stop_reason) == ("stop", "END")
    assert generation.choices[0].num_output_tokens == len("some END")
    await settle()
    assert len(leader.of(Abort)) == 1
    assert sample(front_end, "request_success_total", engine="0", finished_reason="stop") == 1


async def test_no_abort_when_the_last_token_completes_the_stop_string() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec(stop=("END",))]) as generation:
        (added,) = await leader.added()
        leader.answer(added, ids("the END"), "length")
        (update,) = await rest(generation)
        assert (update.text, update.finish_reason) == ("the ", "stop")
    await settle()
    assert not leader.of(Abort)


async def test_a_stop_token_is_counted_and_not_shown() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec()]) as generation:
        (added,) = await leader.added()
        leader.answer(added, ids("hi."), "stop", num_cached_tokens=2)
        (update,) = await rest(generation)
        assert (update.text, update.token_ids) == ("hi", list(ids("hi.")))
        assert (update.finish_reason, update.stop_reason) == ("stop", ord("."))
        assert generation.choices[0].num_output_tokens == 3
        assert generation.choices[0].num_cached_tokens == 2


# --- ends ----------------------------------------------------------------------------------------


async def test_leaving_a_generation_aborts_what_is_unfinished() -> None:
    front_end, leaders = await serving(2)
    async with front_end.generate([spec(), spec(), spec()]):
        (finished,) = await leaders[0].added()
        leaders[0].answer(finished, ids("x"), "length")
        await settle()
    await settle()
    aborts = {abort.request_id for leader in leaders for abort in leader.of(Abort)}
    added = {added.request_id for leader in leaders for added in leader.of(AddRequest)}
    assert aborts == added - {finished.request_id}
    assert front_end.idle.is_set()
    leaders[0].answer(finished, ids("x"), "length")  # a delta that crossed the abort
    await settle()
    assert front_end.health == "ok"


async def test_an_error_of_one_request_ends_its_generation() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec(), spec()]) as generation:
        first, second = await leader.added(2)
        leader.answer(first, ids("x"))
        leader.answer(second, (), "error", error="NaN logits")
        await settle()
        assert [update.text for update in await anext(generation)] == ["x"]
        with pytest.raises(RequestFailedError, match="NaN logits"):
            await anext(generation)
    assert await leader.aborted() == [first.request_id]


async def test_a_failed_replica_ends_its_own_streams_only() -> None:
    front_end, leaders = await serving(2)
    async with (
        front_end.generate([spec()], dp_rank=0) as failing,
        front_end.generate([spec()], dp_rank=1) as going_on,
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(rest(going_on))
        leaders[0].fail("rank 1 died")
        with pytest.raises(RequestFailedError, match="rank 1 died"):
            await rest(failing)
        (added,) = await leaders[1].added()
        leaders[1].answer(added, ids("fine"), "length")
        assert [update.text for update in await waiting] == ["fine"]


async def test_a_drain_lets_streams_end_then_nothing_is_live() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec()]) as generation:
        (added,) = await leader.added()
        front_end.begin_drain()
        assert not front_end.idle.is_set()
        leader.answer(added, ids("x"), "length")
        assert [update.text for update in await rest(generation)] == ["x"]
    await front_end.idle.wait()


async def test_end_streams_ends_what_is_left_with_an_error() -> None:
    front_end, leaders = await serving(2)
    async with front_end.generate([spec() for _ in range(4)]) as generation:
        front_end.begin_drain()
        front_end.end_streams("the server is shutting down")
        with pytest.raises(RequestFailedError, match="the server is shutting down"):
            await anext(generation)
        for leader in leaders:
            await leader.aborted(2)
    assert sample(front_end, "request_success_total", engine="0", finished_reason="error") == 2


async def test_shut_down_reaches_every_leader() -> None:
    front_end, leaders = await serving(2)
    await front_end.shut_down()
    for leader in leaders:
        await leader.next(Shutdown)


# --- metrics -------------------------------------------------------------------------------------


async def test_gauges_follow_the_reports_and_counters_grow() -> None:
    front_end, (leader, _) = await serving(2)
    leader.report(
        num_running=3, num_waiting=2, num_blocks=64, num_free_blocks=48, num_preemptions=4
    )
    leader.report(
        num_running=1,
        num_blocks=64,
        num_free_blocks=32,
        num_preemptions=5,
        prefix_cache_queries=100,
        prefix_cache_hits=40,
    )
    await settle()
    wanted = {
        "num_requests_running": 1,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.5,
        "num_preemptions_total": 5,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
    }
    assert {name: sample(front_end, name, engine="0") for name in wanted} == wanted
    assert {sample(front_end, name, engine="1") for name in wanted} == {0}
    leader.fail("gone")
    await settle()
    assert sample(front_end, "num_requests_running", engine="0") == 0
    assert sample(front_end, "kv_cache_usage_perc", engine="0") == 0
    assert sample(front_end, "num_preemptions_total", engine="0") == 5


async def test_requests_are_counted_by_how_they_end() -> None:
    front_end, (leader,) = await serving()
    async with front_end.generate([spec("abcd") for _ in range(4)]):
        added = await leader.added(4)
        leader.answer(added[0], ids("xy"), "length")
        leader.report(RequestDelta(added[1].request_id, ids("z"), (), "stop"))
        leader.answer(added[2], (), "error", error="bad")
        leader.answer(added[3], ids("q"))
        leader.answer(added[3], ids("rs"))
        await settle()
    for reason in ("length", "stop", "error", "abort"):
        labels = {"engine": "0", "finished_reason": reason}
        assert sample(front_end, "request_success_total", **labels) == 1, reason
    assert sample(front_end, "prompt_tokens_total", engine="0") == 16
    assert sample(front_end, "generation_tokens_total", engine="0") == 6
    assert sample(front_end, "time_to_first_token_seconds_count", engine="0") == 3
    assert sample(front_end, "inter_token_latency_seconds_count", engine="0") == 2
    assert sample(front_end, "e2e_request_latency_seconds_count", engine="0") == 4


async def test_a_silent_leader_is_a_failed_replica() -> None:
    """Leaders beat from ready on; the front end beats from its start."""
    frozen: list[RankInfo] = []
    front_end, (leader,) = front_end_with_leaders(1, heartbeat_seconds=0.1, frozen=frozen)
    async with asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(front_end.run_heartbeats())
        assert await leader.next(Heartbeat) == Heartbeat()
        leader.ready()
        await front_end.all_failed.wait()
        beats.cancel()
    assert front_end.causes == [f"{info(0)}: silent for more than --heartbeat-seconds 0.1"]
    assert frozen == [info(0)]


async def test_a_failed_leader_hears_no_more() -> None:
    """It may stay for hours, in the process of the front end, and read nothing."""
    front_end, (failed, serving) = front_end_with_leaders(2, heartbeat_seconds=0.1)
    failed.fail("rank 1 is gone")
    await settle()
    async with asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(front_end.run_heartbeats())
        await serving.next(Heartbeat)
        beats.cancel()
    assert not failed.messages
