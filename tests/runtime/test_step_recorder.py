"""A rank's recording: it comes and goes while steps run, and ends whatever happens."""

import asyncio

import pytest
from support.fake_worker import LIMIT_S, expected_tokens
from support.replicas import FakeReplica, request, running_replica

from aioengine.messages import ReplicaReady
from aioengine.rank.recording import RecordingRefusedError, StepRecorder
from aioengine.timeline.probe import Kind, Probe
from aioengine.timeline.recorder import spans_of
from aioengine.trace_messages import AskSteps, RecordedSteps


def recorder_of(replica: FakeReplica, rank: int = 0) -> StepRecorder:
    engine = replica.peers[rank] if rank else replica.leader
    return StepRecorder(asyncio.get_running_loop(), engine, replica.watches[rank], engine._device)


async def ready(replica: FakeReplica) -> None:
    await replica.front_ends[0].next(ReplicaReady)
    async with asyncio.timeout(LIMIT_S):
        for peer in replica.peers.values():
            await peer.ready.wait()


def probed(replica: FakeReplica) -> list[str]:
    """Methods that are not the class's own."""
    workers, leader = replica.workers, replica.leader
    owners = [*workers, leader, leader._scheduler, leader._executor, leader._device]
    return [name for owner in owners for name in vars(owner) if hasattr(type(owner), name)]


async def until_nothing_is_probed(replica: FakeReplica) -> None:
    async with asyncio.timeout(LIMIT_S):
        while probed(replica):
            await replica.leader._device.run(lambda: None)


async def test_steps_of_a_leader_and_a_peer() -> None:
    async with running_replica(1, output_rank=1) as replica:
        await ready(replica)
        recorders = [recorder_of(replica, rank) for rank in range(2)]
        last_seqs = [await recorder.begin_and_wait() for recorder in recorders]
        first = max(last_seqs) + 1
        replica.front_ends[0].send(request("r", (1, 2, 3), 8))
        async with asyncio.timeout(LIMIT_S):
            leader, peer = [
                await recorder.wait_steps(AskSteps(first, 5, LIMIT_S)) for recorder in recorders
            ]
        assert replica.leader.look().last_seq >= first + 4
        for recorded in (leader, peer):
            seqs = [step.seq for step in recorded.steps]
            assert seqs[:5] == list(range(first, first + 5))
            assert [recorded.steps[0].num_tokens, recorded.steps[1].num_tokens] == [3, 1]
        on_both = {Kind.STEP, Kind.POST_RECEIVE, Kind.HAND_OVER, Kind.HAND_BACK}
        assert kinds(leader) >= on_both | {Kind.PLAN, Kind.SEND_PLAN, Kind.APPLY, Kind.REPORT}
        assert kinds(peer) >= on_both | {Kind.TAKE_PLAN, Kind.SEND_RESULT}
        for recorder in recorders:
            recorder.end()
        await until_nothing_is_probed(replica)
        await replica.front_ends[0].until_finished("r")
        assert replica.front_ends[0].token_ids("r") == expected_tokens((1, 2, 3), 8)


def kinds(recorded: RecordedSteps) -> set[Kind]:
    return {kind for kind, *_ in spans_of(recorded)}


async def test_one_recording_at_a_time() -> None:
    async with running_replica() as replica:
        recorder = recorder_of(replica)
        with pytest.raises(RecordingRefusedError, match="is starting"):
            await recorder.begin_and_wait()
        await ready(replica)
        await recorder.begin_and_wait()
        with pytest.raises(RecordingRefusedError, match="for somebody else"):
            await recorder.begin_and_wait()
        recorder.end()
        await until_nothing_is_probed(replica)
        with pytest.raises(RecordingRefusedError, match="nothing is recorded"):
            await recorder.wait_steps(AskSteps(1, 1, 1.0))
        await recorder.begin_and_wait()
        recorder.end()
        await until_nothing_is_probed(replica)


async def test_without_steps_the_time_ends_it() -> None:
    async with running_replica() as replica:
        await ready(replica)
        recorder = recorder_of(replica)
        first = await recorder.begin_and_wait() + 1
        recorded = await recorder.wait_steps(AskSteps(first, 5, 0.01))
        assert (recorded.steps, recorded.error, recorded.is_cut) == ((), "", False)
        recorder.end()
        recorder.end()


async def test_whoever_stops_waiting_ends_it() -> None:
    async with running_replica() as replica:
        await ready(replica)
        recorder = recorder_of(replica)
        first = await recorder.begin_and_wait() + 1
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(recorder.wait_steps(AskSteps(first, 5, 60.0)))
            await asyncio.sleep(0)
            recorder.end()
        assert waiting.result().steps == ()
        await until_nothing_is_probed(replica)


async def test_a_failure_ends_it_and_is_told() -> None:
    async with running_replica(1) as replica:
        await ready(replica)
        recorder = recorder_of(replica)
        first = await recorder.begin_and_wait() + 1
        replica.kill(1)
        async with asyncio.timeout(LIMIT_S):
            recorded = await recorder.wait_steps(AskSteps(first, 5, 60.0))
        assert recorded.error == (await replica.failure(0)).cause
        recorder.end()
        assert await recorder.begin_and_wait() == 0
        recorded = await recorder.wait_steps(AskSteps(1, 5, 60.0))
        assert recorded.error
        recorder.end()


async def test_a_rank_that_cannot_record_says_so() -> None:
    async with running_replica() as replica:
        await ready(replica)
        recorder = recorder_of(replica)
        replica.workers[0].probes = lambda: [Probe(replica, "no_such_method", Kind.STEP)]
        first = await recorder.begin_and_wait() + 1
        recorded = await recorder.wait_steps(AskSteps(first, 5, 60.0))
        assert recorded.error.startswith("cannot record: AttributeError: ")
        recorder.end()
        del replica.workers[0].probes
        await until_nothing_is_probed(replica)
