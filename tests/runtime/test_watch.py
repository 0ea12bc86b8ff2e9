"""Who is blamed: device threads that are stuck, steps that last, processes that end; and who is
not: whoever is busy, and everybody while this rank's own loop was late."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support import rpc_methods
from support.fake_worker import LIMIT_S
from support.mailbox import settle
from support.replicas import FakeReplica, info, request, running_replica, watch_of

from aioengine.activity import Activity
from aioengine.control import watch as watch_module
from aioengine.control.loss import explain_loss
from aioengine.control.stall import Sign, find_stall
from aioengine.control.watch import BEATS_PER_LIMIT, Watch
from aioengine.engine.device import DeviceThread
from aioengine.engine.pulse import Pulse
from aioengine.errors import RankLostError, RpcTimeoutError, StepTimeoutError
from aioengine.messages import Heartbeat, RankInfo, ReplicaFailed, ReplicaReady

# --- device threads that are stuck ---------------------------------------------------------------


@contextlib.contextmanager
def stuck(device: DeviceThread) -> Iterator[None]:
    """The thread hangs between two tasks: it takes the next one and never runs it."""
    gate = threading.Event()
    take_arrived = device._take_arrived

    def hang(waiting: Any) -> None:
        gate.wait(2 * LIMIT_S)
        take_arrived(waiting)

    device._take_arrived = hang  # type: ignore[method-assign]
    try:
        yield
    finally:
        gate.set()


def device_of(replica: FakeReplica, rank: int) -> DeviceThread:
    return (replica.peers[rank] if rank else replica.leader)._device


@pytest.mark.parametrize("culprit", [0, 1, 2])
async def test_a_device_thread_that_is_stuck_while_idle_is_named_everywhere(
    culprit: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_replica(2, heartbeat_seconds=0.4) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        with stuck(device_of(replica, culprit)):
            loop = asyncio.get_running_loop()
            begun = loop.time()
            failed = await front_end.next(ReplicaFailed)
            assert loop.time() - begun < 0.4 + 2
            assert failed.cause.startswith(f"{info(culprit)}: its device thread")
            assert "--heartbeat-seconds 0.4" in failed.cause
            for rank in range(3):
                assert (await replica.failure(rank)).cause == failed.cause
    assert "in hang" in caplog.text  # the stacks of the rank


async def test_a_device_thread_that_is_busy_is_not_probed() -> None:
    """A call whose caller has given up: the leader knows of nothing in flight, the rank does."""
    async with running_replica(1, heartbeat_seconds=0.2) as replica:
        await replica.front_ends[0].next(ReplicaReady)
        rpc_methods.GATE.clear()
        with pytest.raises(RpcTimeoutError):
            await replica.leader.collective_rpc(
                rpc_methods.wait_for_gate, ("busy",), timeout_s=0.05
            )
        await beats(replica.watches[0], 1, 3 * BEATS_PER_LIMIT)
        where = replica.watches[0].signs()[info(1)]
        assert where is not None
        assert "collective_rpc support.rpc_methods:wait_for_gate" in str(where)
        assert not replica.watches[0].failed.done()
        rpc_methods.GATE.set()
        assert await replica.leader.collective_rpc(rpc_methods.rank_of) == [0, 1]


def let_front_ends_be_silent(replica: FakeReplica) -> None:
    """The fake ones send no beats; once a command has come they would be missed."""
    replica.leader._front_end_beats.heard = lambda key: None  # type: ignore[method-assign]


async def beats(watch: Watch, rank: int, count: int) -> None:
    """Return when so many more beats of a rank have come."""
    enough = asyncio.Event()
    note, left = watch._note, count

    def noting(who: RankInfo, beat: Heartbeat) -> None:
        nonlocal left
        note(who, beat)
        left -= who.rank == rank
        if left == 0:
            enough.set()

    watch._note = noting  # type: ignore[method-assign]
    await enough.wait()


class HeldDevice:
    """A device thread whose tasks end when the test says so."""

    def __init__(self) -> None:
        self.num_unfinished = 0
        self.tasks: list[Any] = []

    def submit(self, run: Any, on_done: Any, prepare: Any = None) -> None:
        self.num_unfinished += 1
        self.tasks.append(on_done)

    def finish(self) -> None:
        self.num_unfinished -= 1
        self.tasks.pop(0)(None, None)


async def test_probes_are_counted_in_beats() -> None:
    device, activity = HeldDevice(), Activity()
    pulse = Pulse(device, activity)  # type: ignore[arg-type]
    assert [pulse.beat(7).num_unanswered for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(device.tasks) == 1
    device.finish()
    assert pulse.beat(7).num_unanswered == 0
    device.finish()
    device.submit(None, lambda *outcome: None)  # a job
    with activity.within("step 8", 8), activity.operating("all_reduce of tp:0 [ranks 0, 1]"):
        beat = pulse.beat(7)
    assert len(device.tasks) == 1
    assert (beat.last_seq, beat.step, beat.num_unanswered) == (7, 8, 0)
    assert beat.where == "step 8, all_reduce of tp:0 [ranks 0, 1]"
    assert pulse.beat(8).where == "idle"


# --- pauses --------------------------------------------------------------------------------------


async def test_silence_before_and_in_a_pause_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock)
    watching = watch_of(0, [info(1)], heartbeat_s=0.05)
    sent: asyncio.Queue[None] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        watching.pause()
        running = tasks.create_task(watching.run_heartbeats(lambda: sent.put_nowait(None)))
        await settle()
        clock += 60.0
        assert sent.empty()
        watching.resume()
        for _ in range(BEATS_PER_LIMIT):
            await sent.get()
        assert not watching.failed.done()
        running.cancel()


async def test_a_connection_that_closes_in_a_pause_counts() -> None:
    watching = watch_of(0, [info(1)])
    watching.pause()
    watching.connection_closed(1, "connection closed")
    assert (await watching.failed).rank == 1


# --- steps that last -----------------------------------------------------------------------------


def sign(**fields: Any) -> Sign:
    return Sign(Heartbeat(**fields), 0.1)


WAITING = sign(last_seq=6, doing="step 7", operation="all_reduce of tp:0", doing_s=9.0, step=7)
COMPUTING = sign(last_seq=6, doing="step 7", doing_s=9.0, step=7)
AHEAD = sign(last_seq=7, doing="idle")
SILENT = Sign(WAITING.beat, 60.0)


@pytest.mark.parametrize(
    ("signs", "suspects"),
    [
        ((WAITING, COMPUTING), (1,)),
        ((COMPUTING, COMPUTING, WAITING), (0, 1)),
        ((AHEAD, COMPUTING), (1,)),
        ((AHEAD, WAITING), ()),
        ((WAITING, WAITING), ()),
        ((COMPUTING, SILENT), (1,)),
        ((COMPUTING, None), (1,)),
        ((WAITING, sign(last_seq=6, doing="idle")), (1,)),
    ],
)
def test_who_holds_up_a_step(signs: tuple[Sign | None, ...], suspects: tuple[int, ...]) -> None:
    stall = find_stall(7, {info(i): sign for i, sign in enumerate(signs)}, silent_after_s=2.0)
    assert tuple(suspect.rank for suspect in stall.suspects) == suspects


def test_a_stall_tells_of_all_ranks() -> None:
    stall = find_stall(7, {info(0): WAITING, info(1): SILENT, info(2): AHEAD}, 2.0)
    assert "rank 0 is in step 7, all_reduce of tp:0 for 9.1 s, job 6 done; rank 1 is" in stall.text
    assert "rank 2 is in idle" in stall.text
    assert stall.silent == [info(1)]


def test_ranks_that_wait_for_each_other_are_all_told_of_in_full() -> None:
    stall = find_stall(7, {info(0): WAITING, info(1): WAITING, info(2): AHEAD}, 2.0)
    assert stall.suspects == []
    assert stall.text.startswith(f"{info(0)} is in step 7")
    assert f"; {info(1)} is in step 7" in stall.text
    assert "; rank 2 is in idle" in stall.text


async def test_the_rank_that_holds_up_a_step_is_named() -> None:
    async with running_replica(2, heartbeat_seconds=0.2, step_timeout_seconds=0.3) as replica:
        (front_end,) = replica.front_ends
        let_front_ends_be_silent(replica)
        await front_end.next(ReplicaReady)
        for worker in (replica.workers[0], replica.workers[2]):
            worker.operation = "all_reduce of tp:0 [ranks 0, 1, 2]"
        for worker in replica.workers:
            worker.gate.clear()
            worker.entered.clear()
        front_end.send(request("a"))
        for worker in replica.workers:
            await worker.entered.wait()
        with pytest.raises(StepTimeoutError):
            await replica.leader.collective_rpc(rpc_methods.rank_of)
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause.startswith(
            f"{info(1)}: step 7 did not end within --step-timeout-seconds 0.3: "
        )
        assert "rank 0 is in step 7, all_reduce of tp:0 [ranks 0, 1, 2] for" in failed.cause
        assert (await replica.failure(0)).rank == 1


async def test_a_step_that_one_rank_alone_is_still_in_ends_too() -> None:
    """The output rank has answered, so the leader waits for nothing."""
    async with running_replica(1, heartbeat_seconds=0.2, step_timeout_seconds=0.3) as replica:
        (front_end,) = replica.front_ends
        let_front_ends_be_silent(replica)
        await front_end.next(ReplicaReady)
        replica.workers[1].gate.clear()
        front_end.send(request("a", max_tokens=1))
        await front_end.until_finished("a")
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause.startswith(f"{info(1)}: step 7 did not end within")
        assert (await replica.failure(0)).rank == 1


async def test_a_step_behind_a_long_call_is_not_late() -> None:
    async with running_replica(1, heartbeat_seconds=0.2, step_timeout_seconds=0.2) as replica:
        (front_end,) = replica.front_ends
        let_front_ends_be_silent(replica)
        await front_end.next(ReplicaReady)
        rpc_methods.GATE.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(
                replica.leader.collective_rpc(rpc_methods.wait_for_gate, ("long",))
            )
            await beats(replica.watches[0], 1, 1)
            front_end.send(request("a"))
            await beats(replica.watches[0], 1, 3 * BEATS_PER_LIMIT)
            rpc_methods.GATE.set()
            assert await call == ["long of 0", "long of 1"]
        assert (await front_end.until_finished("a")).finish_reason == "length"


async def test_a_step_has_its_time_again_after_this_loop_was_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watching = watch_of(0, [])
    clock = watch_module.time.monotonic()
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock)
    sent_at = clock
    clock += 60.0
    assert watching.step_age_s(sent_at) == 60.0
    watching._beats._excuse()
    clock += 1.0
    assert watching.step_age_s(sent_at) == 1.0


async def test_silent_ranks_of_this_host_are_killed_with_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(watch_module.os, "kill", lambda *args: killed.append(args))
    watching = watch_of(0, [info(1), info(2)], heartbeat_s=0.4)
    for rank in (1, 2):
        watching.heard(rank, Heartbeat(6, "step 7", "", 9.0, 7))
    watching.noted(Heartbeat(6, "step 7", "all_reduce of tp:0", 9.0, 7))
    watching._signs[1] = (watching._signs[1][0], watching._signs[1][1] - 0.3)
    watching.fail_step(7, 5.0)
    assert killed == [(info(1).pid, signal.SIGKILL)]
    failure = watching.failed.result()
    assert failure.rank == 1
    assert isinstance(failure.error, StepTimeoutError)


# --- connections that close ----------------------------------------------------------------------


WAIT_FOR_INPUT = "import sys; sys.stdin.read(); sys.exit(3)"


@contextlib.contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WAIT_FOR_INPUT], stdin=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


async def explanation(pid: int, host: str | None = None) -> str:
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    who = RankInfo(3, "dp0 pp1 tp1", host or socket.gethostname(), pid)
    explain_loss(who, "connection closed", found.set_result)
    return await found


async def test_a_process_of_this_host_tells_how_it_ended() -> None:
    with process() as child:
        lives = await explanation(child.pid)
        assert lives == "connection closed (but its process lives)"
        child.kill()
        killed = await explanation(child.pid)
        assert killed == "connection closed (its process was killed by signal 9, SIGKILL)"
        assert child.poll() is not None
        assert await explanation(child.pid) == "connection closed (its process is gone)"
    with process() as child:
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert "its process exited with status 3" in await explanation(child.pid)
        far = await explanation(child.pid, "another host")
        assert far == "connection closed (killed, crashed or unreachable)"


async def test_a_lost_rank_is_named_with_its_signal() -> None:
    with process() as child:
        who = msgspec.structs.replace(info(1), host=socket.gethostname(), pid=child.pid)
        watching = watch_of(0, [who])
        child.kill()
        watching.connection_closed(1, "connection closed")
        cause = f"{who}: connection closed (its process was killed by signal 9, SIGKILL)"
        failure = await watching.failed
        assert (failure.cause, failure.rank) == (cause, 1)
        assert isinstance(failure.error, RankLostError)
