"""Corners in which something once went wrong; the sections name the file each belongs to."""

import asyncio
import contextlib
import os
from typing import Any

import msgspec
import pytest
from support.connections import HOST, MAX_FRAME_BYTES, RawSide, connected
from support.fake_leaders import front_end_with_leaders
from support.http_server import COMPLETIONS, PROMPT, serving
from support.launches import CONFIG, BootstrapRank, DictStore, outcomes
from support.mailbox import Mailbox, settle
from support.peers import LOAD, PLAN, running_peer
from support.replicas import FakeReplica, device_thread, info, request, running_replica, watch_of
from support.tiny_model import EOS_ID, ids

from aioengine.control import bootstrap, handshake, watch
from aioengine.control.bootstrap import Answer
from aioengine.control.channel import Connection, MemoryLink, frame
from aioengine.control.handshake import Listener, attempt_key, dial
from aioengine.engine import leader as leader_module
from aioengine.engine.device import JobError
from aioengine.errors import HandshakeError, StartupError, StartupTimeoutError
from aioengine.handshake_messages import Endpoint, Proof
from aioengine.limits import MAX_HANDSHAKE_FRAME_BYTES
from aioengine.messages import (
    Abort,
    FrontEndCommand,
    Ordered,
    PeerEvent,
    ReplicaFailed,
    ReplicaReady,
    Shutdown,
    StepPlan,
)

SHORT = msgspec.structs.replace(CONFIG, startup_timeout_seconds=0.3)


def launch(num_ranks: int) -> list[BootstrapRank]:
    store = DictStore()
    return [BootstrapRank(rank, num_ranks, store) for rank in range(num_ranks)]


def raw_frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


# --- test_channel.py


async def test_nothing_is_delivered_after_the_end() -> None:
    connection = Connection(MAX_FRAME_BYTES)
    events: list[Any] = []
    connection.start(FrontEndCommand, events.append, events.append)
    connection.data_received(raw_frame(b"\xc1") + frame(Abort("after the end")))
    assert len(events) == 1
    assert "undecodable" in events[0]


async def test_nothing_is_delivered_to_a_side_that_has_closed() -> None:
    connection = Connection(MAX_FRAME_BYTES)
    got: list[Any] = []
    connection.start(FrontEndCommand, lambda m: (got.append(m), connection.close()), got.append)
    connection.data_received(frame(Abort("a")) + frame(Abort("b")))
    assert got == [Abort("a")]

    a, b = MemoryLink.pair(asyncio.get_running_loop())
    inbox = Mailbox(b, FrontEndCommand)
    a.send(Shutdown())
    b.close()
    await settle()
    assert inbox.messages == []


async def test_a_bad_frame_before_start_ends_the_link_once() -> None:
    connection = Connection(MAX_FRAME_BYTES)
    connection.data_received(frame(Abort("a")) + raw_frame(b"\xc1") + frame(Abort("b")))
    inbox = Mailbox(connection, FrontEndCommand)
    assert inbox.messages == [Abort("a")]
    assert len(inbox.closed) == 1


async def test_closing_ends_a_receive_that_waits() -> None:
    async def close_soon() -> None:
        dialled.close()

    async with connected() as (dialled, _), asyncio.TaskGroup() as tasks:
        tasks.create_task(close_soon())
        with pytest.raises(ConnectionError, match="closed by this side"):
            async with asyncio.timeout(1):
                await dialled.receive()


async def test_a_nested_message_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (dialled, accepted):
        inbox = Mailbox(accepted, PeerEvent)
        body = b"\x93\xa5reply\x01" + b"\x91" * 100_000 + b"\x01"
        dialled.send_frame(raw_frame(body), Shutdown())
        assert "undecodable" in await inbox.until_closed()


# --- test_handshake.py


async def test_a_dialler_that_gives_up_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.1)
    has_left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await reader.read()
                has_left.set()
        await RawSide(reader, writer).close()

    server = await asyncio.start_server(serve, HOST, 0)
    endpoint = Endpoint(HOST, server.sockets[0].getsockname()[1])
    try:
        with pytest.raises(HandshakeError, match="did not answer"):
            await dial(endpoint, 1, "peer", b"", MAX_FRAME_BYTES)
        async with asyncio.timeout(0.5):
            await has_left.wait()
    finally:
        server.close()
        await server.wait_closed()


async def test_an_unproven_connection_cannot_fill_the_memory() -> None:
    """The handshake reads two frames; a flood behind them would lie there for 20 seconds."""
    connection = Connection(MAX_HANDSHAKE_FRAME_BYTES)
    for _ in range(1000):
        connection.data_received(frame(Proof(b"x" * 60_000)))
    with pytest.raises(ConnectionError):
        await connection.receive()


# --- test_bootstrap.py


async def test_a_secret_that_rank_0_does_not_have() -> None:
    """Else whoever can write to the store decides what the secret is."""
    ranks = launch(2)
    ranks[0].config = SHORT
    ranks[1].secret = b"job secret"
    _, second = await outcomes(ranks)
    assert isinstance(second, StartupError)
    assert "this rank was given AIOENGINE_JOB_SECRET and rank 0 was not" in str(second)


async def test_the_hosts_of_all_that_came_are_named() -> None:
    store = DictStore()
    ranks = [BootstrapRank(rank, 3, store, config=SHORT) for rank in (0, 2)]
    for error in await outcomes(ranks):
        assert "host0" in str(error)
        assert "host2" in str(error) or HOST in str(error)


async def test_a_rank_0_that_freezes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "VERDICT_GRACE_S", 0.1)
    store = DictStore()
    key = attempt_key(b"secret", "attempt")
    async with asyncio.TaskGroup() as tasks:
        listener = Listener(tasks, key, [("member", 1)], MAX_FRAME_BYTES)
        endpoint = await listener.open(HOST)
        rank = BootstrapRank(1, 2, store, config=SHORT)
        running = tasks.create_task(rank.outcome())
        hello = await store.wait_set("hello/1")
        answer = Answer(endpoint, "attempt", "secret", left_s=0.3)
        store.set(f"answer/1/{hello.decode()}", msgspec.json.encode(answer).decode())
        await listener.wait_accepted("member", 1)
        await asyncio.wait([running], timeout=2)
        is_done = running.done()
        for connection in listener.accepted("member"):
            connection.close()
        listener.close()
    assert is_done
    assert isinstance(running.result(), StartupTimeoutError)


# --- test_device_thread.py


async def test_outcomes_behind_one_whose_handler_raises_still_come() -> None:
    raised: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context))
    async with device_thread() as device:
        last: asyncio.Future[int] = loop.create_future()

        def fail(value: Any, error: JobError | None) -> None:
            raise RuntimeError("handler")

        device._outcomes.put((fail, 1, None))
        device._outcomes.put((lambda value, error: last.set_result(value), 2, None))
        os.eventfd_write(device._wake_fd, 1)
        async with asyncio.timeout(1):
            assert await last == 2
    assert len(raised) == 1
    loop.set_exception_handler(None)


# --- test_leader.py


async def test_loading_is_bounded() -> None:
    def set_up(replica: FakeReplica) -> None:
        replica.workers[0].on_call = lambda method: replica.workers[0].gate.wait()
        replica.workers[0].gate.clear()

    async with running_replica(set_up=set_up, startup_timeout_seconds=0.1) as replica:
        failed = await replica.front_ends[0].next(ReplicaFailed)
        assert "--startup-timeout-seconds 0.1" in failed.cause
        assert (await replica.failure(0)).rank == 0


async def test_an_error_of_the_step_loop_names_its_type() -> None:
    """An assertion without text, for example."""
    async with running_replica(1) as replica:
        (front_end,) = replica.front_ends
        front_end.send(request("a", max_tokens=50))
        front_end.send(request("a", max_tokens=50))  # the scheduler asserts that ids are unique
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause == f"{info(0)}: AssertionError: "
        assert (await replica.failure(1)).cause == failed.cause


async def test_peers_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "PEERS_END_S", 0.1)
    async with running_replica(2) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.outcomes[1].cancel()
        front_end.send(Shutdown())
        failure = await replica.failure(0)
        assert failure.rank == 1
        assert failure.cause == f"{info(1)}: did not end within 0.1 s of Shutdown"


async def test_a_step_that_takes_too_long_on_a_rank_alone_is_its_own_failure() -> None:
    async with running_replica(heartbeat_seconds=0.2, step_timeout_seconds=0.1) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.workers[0].gate.clear()
        front_end.send(request("a"))
        assert (await replica.failure(0)).rank == 0  # exit code 70, not 71


async def test_a_last_step_that_hangs_does_not_hold_the_shut_down() -> None:
    async with running_replica(step_timeout_seconds=0.2) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.workers[0].gate.clear()
        front_end.send(request("a"))
        await replica.workers[0].entered.wait()
        front_end.send(Shutdown())
        await asyncio.wait(replica.outcomes, timeout=1)
        assert replica.outcomes[0].done()
        assert "--step-timeout-seconds 0.2" in (await replica.failure(0)).cause


async def test_a_receiver_that_is_frozen_does_not_hold_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_module, "FAREWELL_S", 0.1, raising=False)
    async with running_replica(1, num_front_ends=2) as replica:
        first, second = replica.front_ends
        await first.next(ReplicaReady)
        far, _ = replica._sources["front end 0"]
        never = asyncio.Event()
        far.flush = never.wait  # type: ignore[method-assign]
        replica.watches[0].fail("the cause", 1)
        await asyncio.wait(replica.outcomes, timeout=1)
        is_done = [outcome.done() for outcome in replica.outcomes]
        never.set()
        assert is_done == [True, True]
        assert second.of(ReplicaFailed)


async def test_all_ranks_blame_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two peers raise; what the first says reaches the leader after what the second says."""
    monkeypatch.setattr(watch, "BLAME_GRACE_S", 0.05)

    def boom(plan: StepPlan) -> None:
        raise RuntimeError("boom")

    async with running_replica(2) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.workers[1].on_execute = replica.workers[2].on_execute = boom
        replica.workers[2].gate.clear()
        link, held, has_raised = replica.peer_links[1], [], asyncio.Event()
        send = link.send
        link.send = lambda message: (held.append(message), has_raised.set())  # type: ignore
        front_end.send(request("a"))
        await has_raised.wait()
        replica.workers[2].gate.set()
        blame, has_heard = replica.watches[0].job_failed, asyncio.Event()
        replica.watches[0].job_failed = lambda *args: (blame(*args), has_heard.set())  # type: ignore
        await has_heard.wait()
        for message in held:
            send(message)
        link.send = send  # type: ignore[method-assign]
        causes = [(await replica.failure(rank)).cause for rank in range(3)]
        assert len(set(causes)) == 1, causes


# --- test_peer.py


async def test_the_loss_of_the_leader_ends_a_peer_that_was_told_to_end() -> None:
    async with running_peer() as leader:
        leader.worker.gate.clear()
        leader.order(PLAN)
        await leader.worker.entered.wait()
        leader.send(Shutdown())
        await settle()
        leader.link.close()
        await asyncio.wait([leader.outcome], timeout=1)
        assert leader.outcome.done()
        assert (await leader.failure()).rank == 0


async def test_nothing_is_begun_after_a_failure() -> None:
    async with running_peer() as leader:
        for seq in (1, 1, 2):
            leader.send(Ordered(seq, LOAD))
        await leader.failure()
    assert leader.worker.calls == ["load_model"]


async def test_a_frozen_rank_that_may_not_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(watch.os, "kill", refuse)
    watching = watch_of(0, [info(1)], heartbeat_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(watching.run_heartbeats(lambda: None))
        await watching.failed
        beats.cancel()


# --- test_front_end.py


async def test_the_server_has_started_when_the_last_one_to_start_fails() -> None:
    front_end, (first, second) = front_end_with_leaders(2)
    first.ready()
    second.fail("no memory")
    await settle()
    assert front_end.health == "degraded"
    assert front_end.started.is_set()


async def test_leaders_that_end_after_shut_down_have_not_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    front_end, leaders = front_end_with_leaders(2)
    for leader in leaders:
        leader.ready()
    await settle()
    await front_end.shut_down()
    for leader in leaders:
        await leader.next(Shutdown)
        leader.link.close()
    await settle()
    assert front_end.causes == []
    assert "failed" not in caplog.text


# --- test_api_bodies.py, test_api_answers.py


@pytest.mark.parametrize("literal", [b"1e999", b"9" * 5000, b'"\xff"', b'{"a": 1e999}'])
async def test_odd_values_of_unknown_fields(literal: bytes) -> None:
    """They are ignored; and in known fields that are not served they are not."""
    async with serving() as server:
        answer = await server.post(COMPLETIONS, b'{"prompt": "", "novel": ' + literal + b"}")
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        answer = await server.post(COMPLETIONS, b'{"prompt": "", "tools": ' + literal + b"}")
        assert (answer.status, answer.error["code"]) == (400, "unsupported")


async def test_a_body_that_cannot_be_decompressed() -> None:
    async with serving() as server:
        answer = await server.post(COMPLETIONS, b"not gzip", headers={"Content-Encoding": "gzip"})
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


async def test_a_pin_of_many_digits() -> None:
    async with serving() as server:
        headers = {"X-data-parallel-rank": "9" * 5000}
        answer = await server.post(COMPLETIONS, PROMPT, headers=headers)
        assert "X-data-parallel-rank" in answer.error["message"]


async def test_an_end_of_sequence_is_no_stop_reason() -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(server.post(COMPLETIONS, PROMPT))
        (added,) = await server.leader.added()
        server.leader.answer(added, (*ids("hi"), EOS_ID), "stop")
        (choice,) = (await asked).json["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
