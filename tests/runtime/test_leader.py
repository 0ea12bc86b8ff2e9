"""The leader with its peers: tokens come out right, and every way to end is told to everyone."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.fake_worker import LIMIT_S, expected_tokens
from support.mailbox import settle
from support.replicas import FakeReplica, info, request, running_replica

from aioengine.control import watch
from aioengine.messages import (
    Abort,
    DrainRequested,
    Heartbeat,
    ReplicaFailed,
    ReplicaReady,
    Shutdown,
    StepPlan,
    StepReport,
)

SHAPES = [(0, 0), (2, 0), (2, 1), (2, 2)]
"""Peers, output rank."""
LONG = 900
"""More tokens than any test waits for, and fewer than the KV cache holds."""


def boom(plan: StepPlan) -> None:
    raise RuntimeError("boom")


def check_blocks_are_free(replica: FakeReplica) -> None:
    stats = replica.front_ends[0].of(StepReport)[-1].stats
    assert stats.num_blocks == 64
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 64)


# --- serving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_peers", "output_rank"), SHAPES)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("is_async", [True, False])
async def test_requests_finish_with_the_right_tokens(
    num_peers: int, output_rank: int, stages: int, is_async: bool
) -> None:
    async with running_replica(
        num_peers,
        output_rank=output_rank,
        pipeline_parallel_size=stages,
        async_scheduling=is_async,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    ) as replica:
        (front_end,) = replica.front_ends
        wanted = {f"r{i}": (tuple(range(i + 1, 3 * i + 4)), 2 + 5 * i) for i in range(7)}
        for request_id, (prompt, max_tokens) in wanted.items():
            front_end.send(request(request_id, prompt, max_tokens))
        ready = await front_end.next(ReplicaReady)
        assert [i.rank for i in ready.ranks] == list(range(num_peers + 1))
        assert (ready.num_blocks, ready.max_model_len) == (64, 1024)
        for request_id, (prompt, max_tokens) in wanted.items():
            last = await front_end.until_finished(request_id)
            assert last.finish_reason == "length"
            assert front_end.token_ids(request_id) == expected_tokens(prompt, max_tokens)
        await front_end.until(lambda: front_end.of(StepReport)[-1].stats.num_running == 0)
        check_blocks_are_free(replica)
    assert len({tuple(worker.seqs) for worker in replica.workers}) == 1
    for worker in replica.workers:
        started = ["open_device", "load_model", "num_kv_blocks", "allocate_kv", "warm_up", "close"]
        grouping = ("open_store", "open_groups", "close_store")
        assert [call for call in worker.calls if call not in grouping] == started
        assert ("open_groups" in worker.calls) == (num_peers > 0)


async def test_a_stop_token_ends_a_request() -> None:
    stop = expected_tokens((1, 2, 3), 4)[3]
    async with running_replica() as replica:
        (front_end,) = replica.front_ends
        front_end.send(request("a", max_tokens=50, stop_token_ids=(stop,)))
        assert (await front_end.until_finished("a")).finish_reason == "stop"
        assert front_end.token_ids("a") == expected_tokens((1, 2, 3), 4)


@pytest.mark.parametrize(("num_peers", "output_rank"), SHAPES)
async def test_an_abort_ends_a_request_and_frees_its_blocks(
    num_peers: int, output_rank: int
) -> None:
    async with running_replica(num_peers, output_rank=output_rank) as replica:
        (front_end,) = replica.front_ends
        front_end.send(request("a", max_tokens=LONG))
        await front_end.until(lambda: front_end.deltas("a"))
        front_end.send(Abort("a"))
        front_end.send(Abort("a"))
        front_end.send(Abort("never seen"))
        front_end.send(request("b"))
        await front_end.until_finished("b")
        await front_end.until(lambda: front_end.of(StepReport)[-1].stats.num_running == 0)
        check_blocks_are_free(replica)
        assert front_end.token_ids("b") == expected_tokens((1, 2, 3), 5)
        assert all(delta.finish_reason is None for delta in front_end.deltas("a"))


async def test_front_ends_hear_which_of_their_requests_have_a_slot() -> None:
    """Once for each, at the latest with its first token."""
    async with running_replica(num_front_ends=2, max_num_seqs=1) as replica:
        one, other = replica.front_ends
        one.send(request("a"))
        one.send(request("b"))
        other.send(request("a"))
        for front_end, request_id in ((one, "a"), (one, "b"), (other, "a")):
            await front_end.until_finished(request_id)
        assert [i for report in one.of(StepReport) for i in report.admitted] == ["a", "b"]
        assert [i for report in other.of(StepReport) for i in report.admitted] == ["a"]
        waiting = {"a", "b"}
        for report in one.of(StepReport):
            waiting -= {*report.admitted}
            assert not waiting & {delta.request_id for delta in report.deltas}


async def test_each_front_end_hears_how_many_of_its_own_requests_were_taken() -> None:
    async with running_replica(num_front_ends=2) as replica:
        one, other = replica.front_ends
        ready = await one.next(ReplicaReady)
        assert (ready.num_slots, ready.enable_prefix_caching) == (
            replica.config.num_slots,
            replica.config.enable_prefix_caching,
        )
        for request_id in "abc":
            one.send(request(request_id))
        other.send(request("a"))
        for request_id in "abc":
            await one.until_finished(request_id)
        await other.until_finished("a")
        assert one.of(StepReport)[-1].num_added == 3
        assert other.of(StepReport)[-1].num_added == 1


async def test_requests_of_a_front_end_that_is_lost_are_aborted() -> None:
    async with running_replica(1, num_front_ends=2) as replica:
        lost, kept = replica.front_ends
        lost.send(request("same id", max_tokens=LONG))
        kept.send(request("same id", (5, 6), 20))
        await lost.until(lambda: lost.deltas("same id"))
        lost.link.close()
        await kept.until_finished("same id")
        assert kept.token_ids("same id") == expected_tokens((5, 6), 20)
        await kept.until(lambda: kept.of(StepReport)[-1].stats.num_running == 0)
        assert replica.leader.is_ready
        assert not replica.outcomes[0].done()


async def test_the_loss_of_the_last_front_end_ends_the_replica() -> None:
    async with running_replica(1, num_front_ends=2) as replica:
        await replica.front_ends[1].next(ReplicaReady)
        for front_end in replica.front_ends:
            front_end.link.close()
        failures = [await replica.failure(rank) for rank in (0, 1)]
        assert str(info(101)) in failures[0].cause
        assert "last front end" in failures[0].cause
        assert failures[0].rank == 101
        assert failures[1].cause == failures[0].cause


async def test_drain_requests_reach_every_front_end() -> None:
    async with running_replica(1, num_front_ends=2) as replica:
        await replica.front_ends[0].next(ReplicaReady)
        replica.peers[1].request_drain(DrainRequested(1))
        replica.leader.request_drain(DrainRequested(0))
        for front_end in replica.front_ends:
            await front_end.until(lambda box=front_end: len(box.of(DrainRequested)) == 2)


# --- in order ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_peers", "output_rank"), SHAPES)
async def test_shutdown_ends_every_rank_in_order(num_peers: int, output_rank: int) -> None:
    """Also with steps in flight, which complete."""
    async with running_replica(num_peers, output_rank=output_rank) as replica:
        (front_end,) = replica.front_ends
        front_end.send(request("a", max_tokens=LONG))
        await front_end.until(lambda: front_end.deltas("a"))
        front_end.send(Shutdown())
        assert [await outcome for outcome in replica.outcomes] == [None] * (num_peers + 1)
        assert not front_end.of(ReplicaFailed)
    assert all(worker.calls[-1] == "close" for worker in replica.workers)
    assert len({tuple(worker.seqs) for worker in replica.workers}) == 1


async def test_a_peer_that_closes_after_its_goodbye_is_not_lost() -> None:
    async with running_replica(2) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        front_end.send(Shutdown())
        for rank in (1, 2):
            assert await replica.outcomes[rank] is None
            replica.peer_links[rank].close()
        assert await replica.outcomes[0] is None


# --- a peer is lost ------------------------------------------------------------------------------


async def in_a_step(replica: FakeReplica) -> None:
    """Every device thread is in a step and stays there: peers wait for the lost one, too."""
    for worker in replica.workers:
        worker.gate.clear()
        worker.entered.clear()
    replica.front_ends[0].send(request("a"))
    for worker in replica.workers:
        await worker.entered.wait()


async def idle(replica: FakeReplica) -> None:
    replica.front_ends[0].send(request("a"))
    await replica.front_ends[0].until_finished("a")


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("state", [idle, in_a_step])
async def test_a_lost_peer_is_named_everywhere(
    lost: int, state: Callable[[FakeReplica], Awaitable[None]]
) -> None:
    async with running_replica(2, output_rank=2) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        await state(replica)
        replica.kill(lost)
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause.startswith(f"{info(lost)}: connection closed")
        failure = await replica.failure(0)
        assert (failure.cause, failure.rank) == (failed.cause, lost)
        others_view = await replica.failure(3 - lost)
        assert (others_view.cause, others_view.rank) == (failed.cause, lost)


async def test_a_peer_lost_while_loading_is_named_everywhere() -> None:
    def set_up(replica: FakeReplica) -> None:
        replica.workers[1].gate.clear()
        replica.workers[1].on_call = lambda method: replica.workers[1].gate.wait(LIMIT_S)

    async with running_replica(2, set_up=set_up) as replica:
        await settle()
        replica.kill(1)
        replica.workers[1].gate.set()
        (front_end,) = replica.front_ends
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause.startswith(str(info(1)))
        assert (await replica.failure(0)).rank == 1
        assert (await replica.failure(2)).cause == failed.cause
        assert not front_end.of(ReplicaReady)
        assert not replica.leader.is_ready


# --- a step or call raises -----------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 2])
async def test_an_exception_in_a_step_is_blamed_on_its_rank_after_the_grace(
    culprit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "BLAME_GRACE_S", 0.05)
    async with running_replica(2, output_rank=1) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.workers[culprit].on_execute = boom
        front_end.send(request("a"))
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause.startswith(str(info(culprit)))
        assert failed.cause.endswith("RuntimeError: boom")
        assert (await replica.failure(0)).rank == culprit
        for rank in (1, 2):
            assert (await replica.failure(rank)).cause == failed.cause
    assert 'raise RuntimeError("boom")' in caplog.text


async def test_a_closed_connection_within_the_grace_explains_the_exceptions() -> None:
    """A rank dies; the collectives of the others raise first."""
    async with running_replica(2, output_rank=1) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        for rank in (0, 1):
            replica.workers[rank].on_execute = boom
        replica.workers[2].gate.clear()
        front_end.send(request("a"))
        await replica.workers[2].entered.wait()
        await replica.workers[1].entered.wait()
        await settle()
        replica.kill(2)
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause.startswith(f"{info(2)}: connection closed")
        assert (await replica.failure(0)).rank == 2
        assert (await replica.failure(1)).cause == failed.cause


@pytest.mark.parametrize("culprit", [0, 1])
async def test_an_exception_while_loading_fails_the_replica(
    culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BLAME_GRACE_S", 0.05)

    def set_up(replica: FakeReplica) -> None:
        def on_call(method: str) -> None:
            if method == "load_model":
                raise OSError("no such file")

        replica.workers[culprit].on_call = on_call

    async with running_replica(1, set_up=set_up) as replica:
        failed = await replica.front_ends[0].next(ReplicaFailed)
        assert failed.cause.startswith(str(info(culprit)))
        assert failed.cause.endswith("OSError: no such file")
        assert (await replica.failure(0)).rank == culprit
        assert (await replica.failure(1)).cause == failed.cause


async def test_a_rank_alone_fails_only_the_requests_of_the_plan() -> None:
    prompt = tuple(range(40))

    def raise_for_long_prompts(plan: StepPlan) -> None:
        if any(step.token_ids == prompt for step in plan.steps):
            raise RuntimeError("boom")

    async with running_replica(max_num_seqs=1, enable_prefix_caching=False) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.workers[0].on_execute = raise_for_long_prompts
        for request_id in ("a", "b", "c"):
            front_end.send(request(request_id, prompt if request_id == "b" else (7, 8), 9))
        for request_id in ("a", "c"):
            assert (await front_end.until_finished(request_id)).finish_reason == "length"
            assert front_end.token_ids(request_id) == expected_tokens((7, 8), 9)
        failed = await front_end.until_finished("b")
        assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: boom")
        check_blocks_are_free(replica)
        front_end.send(request("d"))
        await front_end.until_finished("d")
        assert front_end.token_ids("d") == expected_tokens((1, 2, 3), 5)


async def test_every_plan_of_a_rank_alone_may_raise() -> None:
    async with running_replica() as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.workers[0].on_execute = boom
        for i in range(5):
            front_end.send(request(str(i)))
        for i in range(5):
            assert (await front_end.until_finished(str(i))).finish_reason == "error"
        replica.workers[0].on_execute = lambda plan: None
        front_end.send(request("after"))
        await front_end.until_finished("after")
        assert front_end.token_ids("after") == expected_tokens((1, 2, 3), 5)


# --- silence and slowness ------------------------------------------------------------------------


async def test_a_silent_peer_is_declared_lost() -> None:
    async with running_replica(2, heartbeat_seconds=0.2) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        replica.outcomes[1].cancel()  # its device thread still works, but it sends no beats
        failed = await front_end.next(ReplicaFailed)
        assert failed.cause.startswith(f"{info(1)}: silent for more than --heartbeat-seconds 0.2")
        failure = await replica.failure(0)
        assert (failure.cause, failure.rank) == (failed.cause, 1)
        assert (await replica.failure(2)).cause == failed.cause


async def test_ranks_that_beat_are_not_lost_while_their_device_is_busy() -> None:
    """Heartbeats come from the loop: a long step is the step time-out's business."""
    async with running_replica(2, heartbeat_seconds=0.1) as replica:
        await replica.front_ends[0].next(ReplicaReady)
        await in_a_step(replica)
        leaders_watch = replica.watches[0]
        take_beat = leaders_watch.heard
        beats: dict[int, list[Heartbeat]] = {1: [], 2: []}
        enough = asyncio.Event()

        def heard(rank: int, beat: Heartbeat | None = None) -> None:
            take_beat(rank, beat)
            if beat is not None:
                beats[rank].append(beat)
                replica.front_ends[0].send(Heartbeat())
            if min(map(len, beats.values())) == 2 * watch.BEATS_PER_LIMIT:
                enough.set()

        leaders_watch.heard = heard  # type: ignore[method-assign]
        await enough.wait()
        last = beats[1][-1]
        assert (last.last_seq, last.doing, last.step, last.num_unanswered) == (6, "step 7", 7, 0)
        for worker in replica.workers:
            worker.gate.set()
        await replica.front_ends[0].until_finished("a")
        assert all(peer.is_ready for peer in replica.peers.values())


@pytest.mark.parametrize("num_peers", [0, 1])
async def test_a_step_that_takes_too_long_fails_the_replica(num_peers: int) -> None:
    async with running_replica(
        num_peers, heartbeat_seconds=0.2, step_timeout_seconds=0.1
    ) as replica:
        (front_end,) = replica.front_ends
        await front_end.next(ReplicaReady)
        await in_a_step(replica)
        failed = await front_end.next(ReplicaFailed)
        assert "--step-timeout-seconds 0.1" in failed.cause
        for rank in range(num_peers + 1):
            assert (await replica.failure(rank)).cause == failed.cause


async def test_a_context_that_does_not_fit_is_refused() -> None:
    async with running_replica(1, max_model_len=1024, block_size=8) as replica:
        failed = await replica.front_ends[0].next(ReplicaFailed)
        assert "--max-model-len 1024 does not fit" in failed.cause
        assert "64 blocks of 8 tokens hold 512" in failed.cause
        assert (await replica.failure(1)).cause == failed.cause


async def test_a_silent_last_front_end_ends_the_replica() -> None:
    """Frozen, its connection stays open: only its missing beats tell."""
    async with running_replica(0, heartbeat_seconds=0.1) as replica:
        front_end = replica.front_ends[0]
        await front_end.next(ReplicaReady)
        front_end.send(Heartbeat())
        failure = await replica.failure(0)
        assert failure.rank == 100
        assert "silent for more than --heartbeat-seconds 0.1" in failure.cause
        assert "carried the last front end" in failure.cause
