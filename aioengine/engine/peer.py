"""Every rank of a replica but its leader: does what arrives, in order, and decides nothing."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, assert_never

from aioengine.control.channel import Link
from aioengine.control.deadline import VERDICT_GRACE_S, Deadline
from aioengine.control.watch import Failure, Watch
from aioengine.engine.device import DeviceThread, DeviceWorker, JobError
from aioengine.engine.phases import PeerPhases
from aioengine.engine.pulse import Pulse
from aioengine.errors import EngineError
from aioengine.messages import (
    CallReply,
    DeviceCall,
    DrainRequested,
    Goodbye,
    Heartbeat,
    Job,
    Ordered,
    PeerCommand,
    PhaseBegan,
    PhaseEnded,
    RemoteCall,
    RemoteReply,
    ReplicaFailed,
    Shutdown,
    StepPlan,
    StepResult,
)
from aioengine.timeline.probe import AnyProbe, Kind, Probe

log = logging.getLogger(__name__)


class Peer:
    """Runs the leader's jobs on this rank's device thread and returns what they give."""

    def __init__(
        self,
        watch: Watch,
        leader_rank: int,
        link: Link,
        device: DeviceThread,
        worker: DeviceWorker,
        startup: Deadline,
    ) -> None:
        self._watch = watch
        self._leader_rank = leader_rank
        self._link = link
        self._device = device
        self._worker = worker
        self.activity = worker.activity
        self._pulse = Pulse(device, worker.activity)
        self._startup = startup
        self._next_seq = 1
        self._last_done = 0
        self._ended = asyncio.Event()
        self.phases = PeerPhases(watch, watch.others[leader_rank], link.send)
        self.ready = asyncio.Event()

    async def run(self) -> Failure | None:
        """Work until Shutdown (None) or the replica's first failure."""
        self._link.start(PeerCommand, self._on_command, self._on_closed)
        self._watch.failed.add_done_callback(lambda _: self._ended.set())
        async with asyncio.TaskGroup() as tasks:
            beats = tasks.create_task(self._beat_when_armed(), name="heartbeats")
            await self._ended.wait()
            beats.cancel()
        if not self._watch.failed.done():
            await self._close_worker()
            leader = self._watch.others[self._leader_rank]
            self.phases.end(EngineError(f"the engine has ended: its leader, {leader}, has left it"))
        if self._watch.failed.done():
            failure = self._watch.failed.result()
            if failure.rank == self._watch.me.rank:
                self._link.send(ReplicaFailed(failure.cause))
            return failure
        self._watch.departed(self._leader_rank)
        self._link.send(Goodbye())
        await self._link.flush()
        return None

    async def _close_worker(self) -> None:
        """After the steps in flight; given up when the leader is lost meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            closing = tasks.create_task(
                self._device.run(self._worker.call, "close", {}), name="close"
            )
            await asyncio.wait([closing, self._watch.failed], return_when=asyncio.FIRST_COMPLETED)
            closing.cancel()

    @property
    def is_ready(self) -> bool:
        """The leader's heartbeats say so."""
        return self.ready.is_set()

    def look(self) -> Heartbeat:
        """What this rank's device thread is in. Any thread."""
        return self._pulse.look(self._last_done)

    def loop_probes(self) -> list[Probe]:
        """What this loop does for a step."""
        return [
            Probe(self, "_start_job", Kind.TAKE_PLAN),
            Probe(self, "_on_step", Kind.SEND_RESULT),
        ]

    def device_probes(self) -> Sequence[AnyProbe]:
        return self._worker.probes()

    def request_drain(self, request: DrainRequested) -> None:
        """This rank got a signal: the front ends drain the launch."""
        self._link.send(request)

    # --- from the leader

    def _on_command(self, command: PeerCommand) -> None:
        if self._watch.failed.done():
            return  # nothing is begun after a failure
        self._watch.heard(self._leader_rank)
        match command:
            case Ordered(seq=seq, job=job):
                self._start_job(seq, job)
            case Heartbeat():
                self.ready.set()  # a leader sends them once the replica is ready
                self._watch.heard(self._leader_rank, command)
            case ReplicaFailed(cause=cause, rank=rank):
                self._watch.fail(cause, rank)
            case Shutdown():
                self._ended.set()
            case PhaseBegan():
                self.phases.on_began(command)
            case PhaseEnded():
                self.phases.on_ending()
                self._device.submit(lambda: None, lambda *_: self.phases.on_ended())
            case _:
                assert_never(command)

    def _on_closed(self, reason: str) -> None:
        self._watch.connection_closed(self._leader_rank, reason)

    def _start_job(self, seq: int, job: Job) -> None:
        if seq != self._next_seq:
            self._watch.fail(
                f"{self._watch.me}: job {seq} arrived from the leader where {self._next_seq} was "
                "due: jobs were lost or repeated",
                self._watch.me.rank,
            )
            return
        self._next_seq += 1
        match job:
            case StepPlan():
                self._device.submit(
                    lambda: self._worker.execute(seq, job),
                    partial(self._on_step, seq),
                    lambda: self._worker.prepare(seq, job),
                )
            case DeviceCall(method=method, kwargs=kwargs):
                self._device.submit(
                    lambda: self._worker.call(method, kwargs), partial(self._on_call, seq)
                )
            case RemoteCall():
                self._device.submit(
                    lambda: self._worker.remote(seq, job), partial(self._on_remote, seq)
                )
            case _:
                assert_never(job)

    # --- from the device thread

    def _on_step(self, seq: int, result: StepResult | None, error: JobError | None) -> None:
        if error is not None:
            self._report_failed(seq, error)
            return
        self._last_done = seq
        if result is not None:
            self._link.send(result)

    def _on_call(self, seq: int, value: Any, error: JobError | None) -> None:
        if error is not None:
            self._report_failed(seq, error)
            return
        self._last_done = seq
        self._link.send(CallReply(seq, value))

    def _on_remote(self, seq: int, value: bytes, error: JobError | None) -> None:
        self._last_done = seq
        if error is not None:
            self._link.send(error.as_remote_failure(seq))
        else:
            self._link.send(RemoteReply(seq, value))

    def _report_failed(self, seq: int, error: JobError) -> None:
        """The leader decides who is to blame; this rank's own view counts if it stays silent for
        longer than the leader's grace."""
        message = error.as_message(seq)
        self._link.send(message)
        self._watch.job_failed(self._watch.me.rank, message, patience=2.0)

    def _blame_silent_leader(self) -> None:
        """The leader would have named the rank that is late, so it is the frozen one itself."""
        leader = self._watch.others[self._leader_rank]
        self._watch.fail(
            f"{leader}: the replica is not ready within --startup-timeout-seconds "
            f"{self._startup.limit_s:g} and its leader is silent; look at that rank's own log, "
            f"and whether process {leader.pid} on {leader.host} is stopped",
            self._leader_rank,
        )
        self._watch.kill(self._leader_rank)

    async def _beat_when_armed(self) -> None:
        try:
            async with self._startup.bound(VERDICT_GRACE_S):
                await self.ready.wait()
        except TimeoutError:
            self._blame_silent_leader()
            return
        await self._watch.run_heartbeats(lambda: self._link.send(self._pulse.beat(self._last_done)))
