"""A peer does what arrives, in order, and ends when it should."""

import asyncio
from typing import Any

import msgspec
import pytest
from support.fake_worker import next_token
from support.mailbox import settle
from support.peers import CONFIG, LOAD, PLAN, running_peer
from support.replicas import info, watch_of

from aioengine.control import watch
from aioengine.errors import ReplicaFailedError, WorkerError
from aioengine.messages import (
    CallReply,
    DeviceCall,
    DrainRequested,
    Goodbye,
    Heartbeat,
    JobFailed,
    Ordered,
    ReplicaFailed,
    Sampled,
    Shutdown,
    StepResult,
)


async def test_jobs_run_in_order_and_are_answered() -> None:
    async with running_peer() as leader:
        leader.order(DeviceCall("open_device", {}), LOAD, PLAN)
        result = await leader.next(StepResult)
        assert leader.messages == [CallReply(1, "cpu"), CallReply(2, None), result]
        assert result == StepResult(3, (Sampled(0, 1, (next_token(5, 1),)),))


async def test_ranks_that_do_not_sample_answer_calls_only() -> None:
    async with running_peer(is_output=False) as leader:
        leader.order(PLAN, LOAD)
        await leader.next(CallReply)
        assert leader.messages == [CallReply(2, None)]
        assert leader.worker.seqs == [1]


async def test_jobs_sent_before_it_runs_are_kept() -> None:
    async with running_peer() as leader:
        leader.order(LOAD, PLAN)  # the peer's task has not begun
        assert (await leader.next(StepResult)).seq == 2


@pytest.mark.parametrize(("seqs", "due"), [((2,), 1), ((1, 3), 2), ((1, 1), 2), ((1, 2, 5), 3)])
async def test_a_gap_in_the_sequence_is_an_error(seqs: tuple[int, ...], due: int) -> None:
    async with running_peer() as leader:
        for seq in seqs:
            leader.send(Ordered(seq, LOAD))
        failure = await leader.failure()
        assert failure.rank == 1
        assert failure.cause.startswith(str(info(1)))
        assert f"job {seqs[-1]} arrived from the leader where {due} was due" in failure.cause
    assert leader.worker.calls == ["load_model"] * (due - 1)


async def test_shutdown_lets_steps_complete_and_says_goodbye() -> None:
    async with running_peer() as leader:
        leader.worker.gate.clear()
        leader.order(PLAN)
        await leader.worker.entered.wait()
        leader.send(Shutdown())
        await settle()
        assert not leader.outcome.done()
        leader.worker.gate.set()
        assert await leader.outcome is None
        await leader.next(Goodbye)
        assert [type(message) for message in leader.messages] == [StepResult, Goodbye]
    assert leader.worker.calls == ["close"]


async def test_the_loss_of_the_leader_ends_it() -> None:
    """Also in a step: nobody waits for a thread that may be stuck in a collective."""
    async with running_peer() as leader:
        leader.worker.gate.clear()
        leader.order(PLAN)
        await leader.worker.entered.wait()
        leader.link.close()
        failure = await leader.failure()
        assert failure.rank == 0
        assert failure.cause.startswith(f"{info(0)}: connection closed")
    assert "close" not in leader.worker.calls


async def test_the_leaders_word_about_the_cause_counts() -> None:
    async with running_peer() as leader:
        leader.send(ReplicaFailed("rank 2: gone"))
        leader.link.close()
        failure = await leader.failure()
        assert (failure.cause, failure.rank) == ("rank 2: gone", None)
        assert isinstance(failure.error, ReplicaFailedError)


async def test_the_leader_says_when_the_failure_is_this_ranks_own() -> None:
    """So that its exit status does, too."""
    async with running_peer() as leader:
        leader.send(ReplicaFailed("rank 1: its job raised", 1))
        failure = await leader.failure()
        assert (failure.cause, failure.rank) == ("rank 1: its job raised", 1)


async def test_an_exception_is_reported_and_the_leader_decides() -> None:
    async with running_peer() as leader:
        leader.worker.on_execute = lambda plan: 1 / 0  # type: ignore[assignment,return-value]
        leader.order(LOAD, PLAN)
        failed = await leader.next(JobFailed)
        assert (failed.seq, failed.type_name, failed.message) == (
            2,
            "ZeroDivisionError",
            "division by zero",
        )
        assert not leader.outcome.done()
        leader.send(ReplicaFailed("rank 2: gone"))
        assert (await leader.failure()).cause == "rank 2: gone"


async def test_its_own_view_counts_when_the_leader_stays_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "BLAME_GRACE_S", 0.05)
    async with running_peer() as leader:
        leader.worker.on_call = lambda method: 1 / 0  # type: ignore[assignment,return-value]
        leader.order(LOAD)
        failure = await leader.failure()
        assert failure.cause == f"{info(1)}: job 1: ZeroDivisionError: division by zero"
        assert failure.rank == 1
        assert isinstance(failure.error, WorkerError)


async def test_heartbeats_begin_with_the_leaders_first() -> None:
    config = msgspec.structs.replace(CONFIG, heartbeat_seconds=0.2)
    async with running_peer(config) as leader:
        leader.order(LOAD)
        await leader.next(CallReply)
        assert not leader.peer.is_ready
        leader.send(Heartbeat(1, "idle"))
        beat = await leader.next(Heartbeat)
        assert (beat.last_seq, beat.where, beat.step) == (1, "idle", 0)
        assert leader.peer.is_ready
        failure = await leader.failure()
        assert failure.rank == 0
        assert "silent for more than --heartbeat-seconds 0.2" in failure.cause
        assert "it was last in idle, job 1 done" in failure.cause


async def test_a_drain_request_goes_to_the_leader() -> None:
    async with running_peer() as leader:
        leader.peer.request_drain(DrainRequested(1))
        assert await leader.next(DrainRequested) == DrainRequested(1)


# --- the watch on its own ------------------------------------------------------------------------


async def test_a_frozen_rank_of_this_host_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(watch.os, "kill", lambda *args: killed.append(args))
    others = {1: info(1), 2: msgspec.structs.replace(info(2), host="another host")}
    watching = watch_of(0, others.values(), heartbeat_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(watching.run_heartbeats(lambda: None))
        await watching.failed
        beats.cancel()
    assert set(killed) == {(info(1).pid, watch.signal.SIGKILL)}


async def test_a_loop_that_is_late_does_not_hold_it_against_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This rank was stopped for a minute; so nothing was heard."""
    watching = watch_of(0, [info(1)], heartbeat_s=0.05)
    clock = 0.0
    sent = 0
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock)
    stop = asyncio.Event()

    def send_beat() -> None:
        nonlocal clock, sent
        sent += 1
        if sent == 1:
            clock += 60.0
        elif sent == 4:
            stop.set()

    async with asyncio.TaskGroup() as tasks:
        beats = tasks.create_task(watching.run_heartbeats(send_beat))
        await stop.wait()
        beats.cancel()
    assert not watching.failed.done()
    assert "late" in caplog.text


async def test_only_the_first_failure_counts() -> None:
    watching = watch_of(0, [info(1), info(2)])
    watching.departed(2)
    watching.connection_closed(2, "closed")
    assert not watching.failed.done()
    watching.connection_closed(1, "closed")
    watching.fail("later", 2)
    assert (await watching.failed).rank == 1
