"""Trace threads: answers while the loop is blocked, and a port as hard as the others."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.http_server import serving
from support.mailbox import settle
from support.replicas import info
from support.traces import HOST, KEY, state, trace_thread

from aioengine.control import loop_watch
from aioengine.control.channel import HEADER_BYTES
from aioengine.control.handshake import dial
from aioengine.control.loop_watch import LoopWatch
from aioengine.control.trace import TraceThread
from aioengine.errors import HandshakeError
from aioengine.frontend import tracer as tracer_module
from aioengine.frontend.tracer import Tracer
from aioengine.handshake_messages import Endpoint, Member
from aioengine.limits import MAX_TRACE_QUESTION_BYTES
from aioengine.messages import Heartbeat
from aioengine.trace_messages import AskStacks, AskState, HeardBeat, RankStacks

ADMIN_KEY = "open sesame"
HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}


async def ask_stacks(member: Member) -> RankStacks:
    (answer,) = await Tracer([member], 0, KEY).ask(AskStacks())
    assert isinstance(answer, RankStacks), answer
    return answer


async def test_state_and_stacks_of_this_process() -> None:
    with trace_thread() as member:
        assert await Tracer([member], 0, KEY).ask(AskState()) == [state()]
        answer = await ask_stacks(member)
        threads = [stack.thread for stack in answer.threads]
        assert threads[0] == "MainThread"
        assert answer.block is None


async def test_stacks_of_a_blocked_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_watch, "TICK_S", 0.1)
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 0.3)
    seen: list[RankStacks] = []

    async def ask_until(condition: Callable[[RankStacks], bool]) -> None:
        while not condition(answer := await ask_stacks(member)):
            pass
        seen.append(answer)

    def block_the_loop() -> None:
        asker = threading.Thread(
            target=lambda: asyncio.run(ask_until(lambda answer: answer.block is not None))
        )
        asker.start()
        asker.join()

    with trace_thread() as member:
        await ask_stacks(member)
        block_the_loop()
        now = seen[0]
        assert "in block_the_loop" in now.threads[0].stack
        assert now.block is not None
        assert not now.block.is_over
        assert now.block.lasted_s >= 0.3
        await ask_until(lambda answer: answer.block is not None and answer.block.is_over)
        later = seen[1].block
        assert later is not None
        assert later.lasted_s >= 0.3
        assert later.ended_s_ago >= 0.0
        assert "in block_the_loop" in later.stacks[0].stack
        assert "in block_the_loop" not in seen[1].threads[0].stack
    lines = [text for text in caplog.messages if "the event loop has not run for" in text]
    assert "in block_the_loop" in lines[0]


async def test_a_watcher_that_is_late_itself_blames_no_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole process was stopped."""
    rounds = iter([False, False, False, True])

    class StoppedLoop:
        def is_closed(self) -> bool:
            return next(rounds)

        def call_soon_threadsafe(self, callback: Any) -> None: ...

    monkeypatch.setattr(loop_watch, "TICK_S", 0.001)
    clock = itertools.count(0.0, 60.0)
    monkeypatch.setattr(loop_watch.time, "monotonic", lambda: next(clock))
    watching = LoopWatch(StoppedLoop())  # type: ignore[arg-type]
    await watching.run()
    assert watching.block() is None
    assert not caplog.messages


# --- the port ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "role", "key"),
    [(0, "trace", b"wrong"), (1, "trace", KEY), (0, "peer", KEY), (0, "front_end", KEY)],
)
async def test_who_may_not_ask_is_dropped(
    rank: int, role: Any, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with trace_thread() as member:
        assert member.trace is not None
        with pytest.raises(HandshakeError):
            await dial(member.trace, rank, role, key, 1000)
        await ask_stacks(member)
    assert "dropped a control connection from" in caplog.text


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\3abc", b"\xff" * 8, b"\0\0\0\x01\x90"]
)
async def test_what_is_no_handshake_is_dropped(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with trace_thread() as member:
        assert member.trace is not None
        reader, writer = await asyncio.open_connection(HOST, member.trace.port)
        writer.write(data)
        await reader.read()
        writer.close()
        await ask_stacks(member)
    assert "dropped" in caplog.text


@pytest.mark.parametrize(
    "body", [b"x" * (MAX_TRACE_QUESTION_BYTES + 1), b"\x81\xa4type\xa4what", b"\xc1"]
)
async def test_what_is_no_question_ends_the_connection(body: bytes) -> None:
    with trace_thread() as member:
        assert member.trace is not None
        connection = await dial(member.trace, 0, "trace", KEY, 1000)
        connection.send_frame(len(body).to_bytes(HEADER_BYTES, "big") + body, AskState())
        with pytest.raises(ConnectionError):
            await connection.receive()
        connection.close()
        await ask_stacks(member)


async def test_a_rank_that_does_not_answer_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer_module, "ANSWER_S", 0.2)
    silent = TraceThread(HOST)  # connections wait in its backlog
    try:
        gone = Endpoint(HOST, 1)
        with trace_thread() as member:
            members = [member, *(member_at(i, at) for i, at in ((1, silent.endpoint), (2, gone)))]
            answers = await Tracer(members, 0, KEY).ask(AskState())
        assert answers[0] == state()
        assert answers[1] == "no answer within 0.2 s: its process is stopped or unreachable"
        assert "no answer: cannot connect to 127.0.0.1:1" in str(answers[2])
    finally:
        silent.close()


def member_at(rank: int, endpoint: Endpoint) -> Member:
    return Member(info=info(rank), node="0", endpoint=None, config=b"", trace=endpoint)


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/trace/state", "/trace/stacks", "/trace/steps"])
async def test_only_the_admin_key_opens(path: str) -> None:
    async with serving(api_key=("other",)) as served:
        refused = await served.get(path, headers={"Authorization": "Bearer other"})
        assert refused.status == 403
        assert "--admin-api-key" in refused.error["message"]
    async with serving(admin_api_key=ADMIN_KEY, api_key=("other",)) as served:
        for headers in ({}, {"Authorization": "Bearer other"}):
            assert (await served.get(path, headers=headers)).status == 401
        assert (await served.get(path, headers=HEADERS)).json["ranks"] == []


async def test_state_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer_module, "ANSWER_S", 0.2)
    heard = (HeardBeat(1, Heartbeat(11, "step 12", "", 0.5, 12), 2.0),)
    with trace_thread(0, key=b"key", heard=heard) as member:
        gone = member_at(1, Endpoint(HOST, 1))
        async with serving(
            states=("failed", "starting"), members=[member, gone], admin_api_key=ADMIN_KEY
        ) as served:
            served.leaders[1].send(Heartbeat(7, "load_model"))
            await settle()
            answer = await served.get("/trace/state", headers=HEADERS)
    assert answer.status == 200
    first, second = answer.json["ranks"]
    assert (first["rank"], first["error"], first["replica"]) == (0, None, "failed")
    assert (first["last_step"], first["doing"], first["num_queued"]) == (12, "step 13", 2)
    assert first["operation"] == "all_reduce of tp:0 [ranks 0, 1]"
    assert first["max_loop_lag_seconds"] == 0.25
    assert (second["rank"], second["replica"]) == (1, "starting")
    assert "cannot connect" in second["error"]
    assert second["last_heartbeat"]["doing"] == "load_model"  # younger than what rank 0 heard


async def test_stacks_over_http() -> None:
    with trace_thread(0, key=b"key") as member:
        async with serving(members=[member], admin_api_key=ADMIN_KEY) as served:
            answer = await served.get("/trace/stacks", headers=HEADERS)
    (rank,) = answer.json["ranks"]
    assert rank["threads"][0]["thread"] == "MainThread"
    assert "test_stacks_over_http" not in rank["threads"][0]["stack"]  # it waits: the loop runs
    assert rank["loop_block"] is None
