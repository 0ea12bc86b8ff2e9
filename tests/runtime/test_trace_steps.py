"""Recording steps through trace threads, and over HTTP."""

import asyncio
import base64
import threading

import pytest
from support.http_server import serving
from support.mailbox import LIMIT_S
from support.recordings import recorded, step
from support.replicas import info
from support.traces import HOST, KEY, FakeSteps, trace_thread

from aioengine.control.handshake import dial
from aioengine.frontend import tracer as tracer_module
from aioengine.frontend.tracer import RecordedRank, RecordingError, Tracer
from aioengine.handshake_messages import Endpoint, Member
from aioengine.layout import ParallelLayout
from aioengine.timeline.clock import SAME_CLOCK
from aioengine.timeline.probe import Kind
from aioengine.trace_messages import AskSteps

HEADERS = {"Authorization": "Bearer sesame"}
FOUND = recorded([step(9, 1, 2), step(10, 3, 4)], [(Kind.LINEAR, 1, 2)])
GONE = Member(
    info=info(1), node="0", endpoint=None, config=b"", trace=Endpoint(HOST, 1)
)  # nobody listens on port 1


def giving(last_seq: int = 4) -> FakeSteps:
    steps = FakeSteps(last_seq)
    steps.given = FOUND
    return steps


async def until(event: threading.Event) -> None:
    """Something happens in a trace thread."""
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, LIMIT_S)


async def until_ended(steps: FakeSteps) -> None:
    await until(steps.ended)
    assert not steps.is_recording


async def test_ranks_of_a_replica_are_asked_for_the_same_steps() -> None:
    first, second, other = giving(4), giving(6), giving(40)
    with (
        trace_thread(0, steps=first) as a,
        trace_thread(1, steps=second) as b,
        trace_thread(2, steps=other) as c,
    ):
        replicas = await Tracer([a, b, c], 0, KEY).record([[a, b], [c]], 5, 2.0)
        for steps in (first, second, other):
            await until_ended(steps)
    assert replicas == [
        [RecordedRank(FOUND, 7, SAME_CLOCK)] * 2,
        [RecordedRank(FOUND, 41, SAME_CLOCK)],
    ]
    assert first.asked == second.asked == [AskSteps(7, 5, 2.0)]
    assert other.asked == [AskSteps(41, 5, 2.0)]


async def test_another_clock_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    with trace_thread(steps=giving()) as member:
        monkeypatch.setattr(tracer_module, "own_clock", lambda: "another one")
        ((found,),) = await Tracer([member], 0, KEY).record([[member]], 5, 2.0)
    assert isinstance(found, RecordedRank)
    # It is the same one in truth.
    assert abs(found.clock.offset_ns) <= found.clock.error_ns < LIMIT_S * 1e9


async def test_one_recording_at_a_time() -> None:
    steps = FakeSteps()
    with trace_thread(steps=steps) as member:
        tracer = Tracer([member], 0, KEY)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(tracer.record([[member]], 5, 60.0))
            await asyncio.sleep(0)
            with pytest.raises(RecordingError, match="for somebody else"):
                await tracer.record([[member]], 5, 60.0)
            waiting.cancel()
        assert member.trace is not None
        steps.ended.clear()
        steps.is_recording = True  # for another front end
        with pytest.raises(RecordingError, match=r"rank 0 .*: busy"):
            await tracer.record([[member]], 5, 60.0)
        assert steps.is_recording
        steps.is_recording = False
        steps.given = FOUND
        assert await tracer.record([[member]], 5, 60.0)


async def test_a_client_that_leaves_ends_the_recording() -> None:
    steps = FakeSteps()
    with trace_thread(steps=steps) as member:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(Tracer([member], 0, KEY).record([[member]], 5, 60.0))
            await until(steps.is_asked)
            waiting.cancel()
        await until_ended(steps)


async def test_a_rank_that_ends_while_it_records_is_told_of() -> None:
    dying, steps = FakeSteps(), giving()
    with trace_thread(0, steps=steps) as member:
        async with asyncio.TaskGroup() as tasks:
            with trace_thread(1, steps=dying) as victim:
                members = [member, victim, GONE]
                waiting = tasks.create_task(Tracer(members, 0, KEY).record([members], 5, 60.0))
                await until(dying.is_asked)
    ((found, died, gone),) = waiting.result()
    assert found == RecordedRank(FOUND, 5, SAME_CLOCK)
    assert str(died).startswith("it ended while it recorded: connection closed")
    assert "no answer: cannot connect to" in str(gone)


async def test_steps_are_for_whoever_began_to_record() -> None:
    with trace_thread(steps=giving()) as member:
        assert member.trace is not None
        connection = await dial(member.trace, 0, "trace", KEY, 2**20)
        connection.send(AskSteps(1, 1, 1.0))
        async with asyncio.timeout(LIMIT_S):
            assert b"nothing is recorded" in await connection.receive()
        connection.close()


# --- over HTTP -----------------------------------------------------------------------------------


async def test_steps_over_http() -> None:
    with trace_thread(0, key=b"key", steps=giving()) as member:
        async with serving(members=[member, GONE], admin_api_key="sesame") as served:
            served.api.layout = ParallelLayout(tp_size=2)
            answer = await served.get("/trace/steps?steps=2&seconds=1&replica=0", headers=HEADERS)
    assert answer.status == 200
    first, second = answer.json["ranks"]
    assert (answer.json["steps"], answer.json["seconds"]) == (2, 1)
    assert (first["rank"], first["error"], first["first_seq"]) == (0, None, 5)
    assert first["clock"] == {"offset_ns": 0, "error_ns": 0}
    assert base64.b64decode(first["recorded"]["spans"]) == FOUND.spans
    assert first["recorded"]["steps"][0] == [9, 1_000_000, 2_000_000, 2, 2]
    assert "cannot connect" in second["error"]


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("steps=0", 400, "steps must be a whole number from 1 to 1000, got '0'"),
        ("steps=1001", 400, "steps must be"),
        ("seconds=x", 400, "seconds must be a whole number from 1 to 60, got 'x'"),
        ("seconds=61", 400, "seconds must be"),
        ("replica=1", 400, "there is no replica '1': there are 1, from 0 on"),
        ("replica=-1", 400, "there is no replica '-1'"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(query: str, status: int, message: str) -> None:
    async with serving(admin_api_key="sesame") as served:
        answer = await served.get(f"/trace/steps?{query}", headers=HEADERS)
        assert answer.status == status
        assert message in answer.error["message"]
        assert (await served.get(f"/trace/steps?{query}")).status == 401


async def test_a_second_client_is_told_to_wait() -> None:
    steps = FakeSteps()
    steps.is_recording = True
    with trace_thread(0, key=b"key", steps=steps) as member:
        async with serving(members=[member], admin_api_key="sesame") as served:
            answer = await served.get("/trace/steps", headers=HEADERS)
    assert answer.status == 409
    assert answer.error["code"] == "recording"
