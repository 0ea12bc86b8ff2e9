"""The leader's way to its ranks: every job goes to all of them, in one sequence.

Plans are answered by the output rank only, device calls by every rank.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from aioengine.control.channel import Link, frame
from aioengine.control.watch import Failure, Watch
from aioengine.engine.device import DeviceThread, DeviceWorker, JobError
from aioengine.engine.pulse import Pulse
from aioengine.engine.remote_calls import RemoteCalls
from aioengine.errors import DivergenceError, ReplicaFailedError
from aioengine.messages import (
    CallReply,
    DeviceCall,
    DrainRequested,
    EngineLeft,
    Goodbye,
    Heartbeat,
    Job,
    JobFailed,
    Ordered,
    PeerCommand,
    PeerEvent,
    PhaseEntered,
    RemoteCall,
    RemoteFailed,
    RemoteReply,
    ReplicaFailed,
    Shutdown,
    StepPlan,
    StepResult,
)


@dataclass(frozen=True, slots=True)
class StepDone:
    plan: StepPlan
    result: StepResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Only on a replica of one rank; with more, a failed step fails the replica."""

    plan: StepPlan
    error: JobFailed


@dataclass(slots=True)
class _PendingCall:
    method: str
    future: "asyncio.Future[list[Any]]"
    replies: dict[int, Any]


RankNews = DrainRequested | PhaseEntered | EngineLeft
"""What a peer's program or launcher wants, beside the jobs."""


class Executor:
    """Sends jobs to this rank's device thread and to the peers, and collects what comes back.

    `output_rank` is the one that samples: token history goes to no other. `on_step` gets every
    finished step in plan order, `on_news` what else a peer says. Loop thread only.
    """

    def __init__(
        self,
        watch: Watch,
        device: DeviceThread,
        worker: DeviceWorker,
        peers: dict[int, Link],
        output_rank: int,
        on_step: Callable[[StepDone | StepFailed], None],
        on_news: Callable[[int, RankNews], None],
    ) -> None:
        self._watch = watch
        self._rank = watch.me.rank
        self._device = device
        self._worker = worker
        self._peers = peers
        self._output_rank = output_rank
        self._on_step = on_step
        self._on_news = on_news
        self._pulse = Pulse(device, worker.activity)
        self._last_beat = Heartbeat()
        self._seq = 0
        self._plans: deque[tuple[int, StepPlan, float]] = deque()
        self._calls: dict[int, _PendingCall] = {}
        self._remote = RemoteCalls([watch.me, *watch.others.values()])
        self._raised: tuple[int, RemoteFailed] | None = None
        """The first method that raised, and on which rank, unless a step behind it went well."""
        self._waiting_for: set[int] = set(peers)
        self._all_departed = asyncio.Event()
        self.last_seq = 0
        """Of the last finished step or call."""
        self._last_own_seq = 0
        """Of the last job that this rank itself has finished."""
        watch.failed.add_done_callback(self._fail_calls)
        for rank, link in peers.items():
            link.start(PeerEvent, partial(self._on_peer, rank), partial(self._on_peer_closed, rank))

    @property
    def num_in_flight(self) -> int:
        return len(self._plans)

    @property
    def last_beat(self) -> Heartbeat:
        """What the peers were told last."""
        return self._last_beat

    def late_step(self, limit_s: float) -> int | None:
        """The plan that has not ended in time, if there is one."""
        if self._plans:
            seq, _, sent_at = self._plans[0]
            if self._watch.step_age_s(sent_at) > limit_s:
                return seq
        return self._watch.step_that_lasts(limit_s)

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Its end comes to `on_step`."""
        seq = self._send(plan)
        self._plans.append((seq, plan, time.monotonic()))
        self._device.submit(
            lambda: self._worker.execute(seq, plan),
            partial(self._on_own_step, seq),
            lambda: self._worker.prepare(seq, plan),
        )

    async def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Run a registered method on every rank; values in rank order.

        Raises ReplicaFailedError with the first cause when a rank raises or is lost.
        """
        seq = self._send(DeviceCall(method, kwargs))
        pending = _PendingCall(method, asyncio.get_running_loop().create_future(), {})
        self._calls[seq] = pending
        self._device.submit(
            lambda: self._worker.call(method, kwargs), partial(self._on_own_call, seq)
        )
        return await pending.future

    async def remote_call(self, call: RemoteCall, timeout_s: float | None) -> Any:
        """`collective_rpc`: the method's values in rank order, or the one that was asked for.

        Raises WorkerError when it raised on any rank, RpcTimeoutError after `timeout_s` (None: no
        limit), RankLostError when a rank is lost meanwhile, ReplicaFailedError when the replica
        had failed or ended before. Whoever stops waiting leaves the sequence usable.
        """
        self._remote.check_open()
        seq = self._send(call)
        self._remote.begin(seq, call)
        self._device.submit(
            lambda: self._worker.remote(seq, call), partial(self._on_own_remote, seq)
        )
        return await self._remote.result(seq, timeout_s)

    def look(self) -> Heartbeat:
        """What this rank's device thread is in. Any thread."""
        return self._pulse.look(self._last_own_seq)

    def send_heartbeats(self) -> None:
        self._last_beat = self._pulse.beat(self._last_own_seq)
        self._watch.noted(self._last_beat)
        self.broadcast(self._last_beat)

    def broadcast(self, message: PeerCommand) -> None:
        """To every peer, behind the jobs that were sent before."""
        for link in self._peers.values():
            link.send(message)

    def unanswered(self) -> tuple[str, list[int]]:
        """The oldest call that is not done, and the ranks that have not answered it."""
        if not self._calls:
            return "", []
        pending = next(iter(self._calls.values()))
        return pending.method, sorted({self._rank, *self._peers} - pending.replies.keys())

    async def shut_down(self, timeout_s: float) -> None:
        """Ask the peers to end and wait for their goodbyes. Calls in flight and later ones raise
        ReplicaFailedError."""
        self._remote.end(f"the replica led by {self._watch.me} has been shut down")
        self.broadcast(Shutdown())
        if not self._waiting_for:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_departed.wait()
        except TimeoutError:
            late = sorted(self._waiting_for)
            names = ", ".join(str(self._watch.others[rank]) for rank in late)
            cause = f"{names}: did not end within {timeout_s:g} s of Shutdown"
            self._watch.fail(cause, late[0])
            raise ReplicaFailedError(cause) from None

    async def announce_failure(self, failure: Failure) -> None:
        """Tell the peers that are left why the replica ends."""
        self.broadcast(ReplicaFailed(failure.cause, failure.rank))
        for link in self._peers.values():
            await link.flush()

    def _send(self, job: Job) -> int:
        self._seq += 1
        links = dict(self._peers)
        if isinstance(job, StepPlan) and job.history:
            if (output := links.pop(self._output_rank, None)) is not None:
                output.send(Ordered(self._seq, job))
            job = job.without_history()
        if links:
            message = Ordered(self._seq, job)
            data = frame(message)
            for link in links.values():
                link.send_frame(data, message)
        return self._seq

    # --- what comes back

    def _on_own_step(self, seq: int, result: StepResult | None, error: JobError | None) -> None:
        self._last_own_seq = seq
        if error is not None:
            self._on_failed(self._rank, error.as_message(seq))
        elif result is not None:
            self._on_result(result)

    def _on_own_call(self, seq: int, value: Any, error: JobError | None) -> None:
        self._last_own_seq = seq
        if error is not None:
            self._on_failed(self._rank, error.as_message(seq))
        else:
            self._on_reply(self._rank, CallReply(seq, value))

    def _on_own_remote(self, seq: int, value: bytes, error: JobError | None) -> None:
        self.last_seq = self._last_own_seq = seq
        if error is not None:
            self._on_remote_failed(self._rank, error.as_remote_failure(seq))
        else:
            self._remote.on_reply(self._rank, RemoteReply(seq, value))

    def _on_peer(self, rank: int, event: PeerEvent) -> None:
        self._watch.heard(rank)
        match event:
            case StepResult():
                self._on_result(event)
            case CallReply():
                self._on_reply(rank, event)
            case RemoteReply():
                self._remote.on_reply(rank, event)
            case RemoteFailed():
                self._on_remote_failed(rank, event)
            case JobFailed():
                self._on_failed(rank, event)
            case Heartbeat():
                self._watch.heard(rank, event)
            case ReplicaFailed(cause=cause):
                self._watch.fail(cause, rank)
            case DrainRequested() | PhaseEntered() | EngineLeft():
                self._on_news(rank, event)
            case Goodbye():
                self._watch.departed(rank)
                self._waiting_for.discard(rank)
                if not self._waiting_for:
                    self._all_departed.set()
            case _:
                assert_never(event)

    def _on_peer_closed(self, rank: int, reason: str) -> None:
        self._watch.connection_closed(rank, reason)

    def _on_result(self, result: StepResult) -> None:
        seq, plan, _ = self._plans.popleft()
        assert seq == result.seq, f"result of job {result.seq}, expected {seq}"
        self.last_seq = seq
        if self._raised is not None and self._raised[1].seq < seq:
            self._raised = None
        self._on_step(StepDone(plan, result))

    def _on_remote_failed(self, rank: int, failed: RemoteFailed) -> None:
        self._remote.on_failed(rank, failed)
        if self._raised is None and failed.type_name != DivergenceError.__name__:
            self._raised = (rank, failed)

    def _on_reply(self, rank: int, reply: CallReply) -> None:
        pending = self._calls.get(reply.seq)
        if pending is None:
            return  # the replica failed while this reply was on its way
        pending.replies[rank] = reply.value
        if len(pending.replies) == len(self._peers) + 1:
            del self._calls[reply.seq]
            self.last_seq = reply.seq
            if not pending.future.done():  # else the caller has given up
                pending.future.set_result([value for _, value in sorted(pending.replies.items())])

    def _fail_calls(self, failed: "asyncio.Future[Failure]") -> None:
        for pending in self._calls.values():
            if not pending.future.done():  # else the caller has given up
                pending.future.set_exception(ReplicaFailedError(failed.result().cause))
        self._calls.clear()
        self._remote.fail(failed.result())

    def _on_failed(self, rank: int, failed: JobFailed) -> None:
        if not self._peers and self._plans and self._plans[0][0] == failed.seq:
            _, plan, _ = self._plans.popleft()
            self.last_seq = failed.seq
            self._on_step(StepFailed(plan, failed))
            return
        if self._raised is not None and failed.type_name == DivergenceError.__name__:
            # Others sat in a collective of the method that raised: this job is not to blame.
            rank, first = self._raised
            failed = JobFailed(first.seq, first.type_name, first.message, first.traceback)
        self._watch.job_failed(rank, failed)
