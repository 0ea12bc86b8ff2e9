"""One fault in one launch of two replicas that both stream: what all saw, and what is left."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.chaos_faults import (
    FINISHED,
    GONE_LIMIT_S,
    HEARTBEAT_S,
    KILLED,
    Fault,
    Promise,
    promise,
)
from support.known_requests import KnownRequest
from support.launching import STORIES, Launch
from support.sightings import Sighting, Streams, patient_session, summary

from aioengine.layout import ParallelLayout

ADMIN_KEY: Final = "chaos"


@dataclass(slots=True)
class Case:
    """What a fault on a rank did. `problems` lists what the contract promises otherwise."""

    fault: Fault
    victim: int
    layout: ParallelLayout
    failed_clients: list[Sighting] = field(default_factory=list)
    other_clients: list[Sighting] = field(default_factory=list)
    caller_saw: str = ""
    """The answer of `/collective_rpc` that caused the fault."""
    happened: float = 0.0
    ended: dict[int, float] = field(default_factory=dict)
    """When each rank was gone; both by `time.monotonic()`."""
    statuses: dict[int, int | str] = field(default_factory=dict)
    first_failures: list[str] = field(default_factory=list)
    num_processes_left: int = 0
    shared_memory_left: set[str] = field(default_factory=set)

    @property
    def promise(self) -> Promise:
        return promise(self.fault, self.victim, self.layout)

    @property
    def error_s(self) -> float:
        """From the fault to the last failed client's error."""
        return max(seen.ended for seen in self.failed_clients) - self.happened

    @property
    def gone_s(self) -> float:
        """From the fault until the failed ranks were gone."""
        ended = [self.ended[rank] for rank in self.promise.gone_ranks]
        return max(ended, default=self.happened) - self.happened

    @property
    def num_outlasting(self) -> int:
        """Streams of the other replica that got tokens after the failed ones had ended."""
        failed = max(seen.ended for seen in self.failed_clients)
        return sum(seen.last_token > failed for seen in self.other_clients)

    def problems(self) -> list[str]:
        return [*self._client_problems(), *self._rank_problems()]

    def _client_problems(self) -> Iterator[str]:
        promised = self.promise
        for whose, seen, wanted in (
            ("failed", self.failed_clients, promised.failed_clients),
            ("other", self.other_clients, promised.other_clients),
        ):
            if not all(client.ending in wanted and client.is_right for client in seen):
                yield f"clients of the {whose} replica: {summary(seen)}: {set(map(str, seen))}"
        is_method = self.fault in (Fault.METHOD, Fault.METHOD_COLLECTIVE)
        if is_method and not self.caller_saw.startswith(f"500 rank {self.victim} ("):
            yield f"the caller of the method got {self.caller_saw}"
        if promised.failed_clients == FINISHED:
            return
        if self.error_s > self.fault.error_limit_s:
            yield f"error after {self.error_s:.2f} s, limit {self.fault.error_limit_s} s"
        errors = {seen.message for seen in self.failed_clients if seen.ending == "error"}
        yield from self._blame_problems(errors)

    def _rank_problems(self) -> Iterator[str]:
        promised = self.promise
        if self.gone_s > GONE_LIMIT_S:
            yield f"failed ranks gone after {self.gone_s:.1f} s"
        for rank, status in self.statuses.items():
            if status not in promised.statuses[rank]:
                yield f"rank {rank} ended with {status}, wanted {set(promised.statuses[rank])}"
        num_failed = sum(status in (70, 71) for status in self.statuses.values())
        if len(self.first_failures) != num_failed:
            yield f"{len(self.first_failures)} 'first failure' lines of {num_failed} failed ranks"
        yield from self._blame_problems(self.first_failures)
        if self.num_processes_left or self.shared_memory_left:
            yield f"left: {self.num_processes_left} processes, {self.shared_memory_left}"

    def _blame_problems(self, texts: Iterable[str]) -> Iterator[str]:
        """Texts that name another rank than those who may be blamed."""
        if blamed := self.promise.blamed:
            names = tuple(f"rank {rank} (" for rank in blamed)
            for text in texts:
                said = text.partition("first failure: ")[2] or text
                if not said.startswith(names):
                    yield f"another rank is blamed: {said}"


@contextmanager
def ends_of(pids: Mapping[int, int]) -> Iterator[dict[int, "asyncio.Future[float]"]]:
    """When each process ends, as the kernel tells this event loop; by rank, as `pids`."""
    loop = asyncio.get_running_loop()
    ends: dict[int, asyncio.Future[float]] = {rank: loop.create_future() for rank in pids}
    pidfds = {rank: os.pidfd_open(pid) for rank, pid in pids.items()}

    def on_end(rank: int) -> None:
        ends[rank].set_result(time.monotonic())
        loop.remove_reader(pidfds[rank])

    for rank, pidfd in pidfds.items():
        loop.add_reader(pidfd, on_end, rank)
    try:
        yield ends
    finally:
        for pidfd in pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)


def faulty_launch(layout: ParallelLayout) -> Launch:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    size = str(layout.launch_world_size)
    command = [*torchrun, "--nproc-per-node", size, "-m", "support.faulty_rank"]
    flags = {
        "--model": STORIES,
        "-tp": layout.tp_size,
        "-pp": layout.pp_size,
        "-dp": layout.dp_size,
        "--heartbeat-seconds": HEARTBEAT_S,
        "--admin-api-key": ADMIN_KEY,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    tests = Path(__file__).parents[1]
    return Launch(*words, command=command, env={"PYTHONPATH": f"{tests.parent}:{tests}"})


async def pids_by_rank(session: aiohttp.ClientSession) -> dict[int, int]:
    async with session.get("/server_info") as info:
        replicas = (await info.json())["replicas"]
    return {rank["rank"]: rank["pid"] for replica in replicas for rank in replica["ranks"]}


async def run_case(
    fault: Fault, victim: int, layout: ParallelLayout, requests: Sequence[KnownRequest]
) -> Case:
    """Each replica streams `requests` when `fault` hits the rank `victim`."""
    case = Case(fault, victim, layout)
    memory_before = shared_memory_names()
    with faulty_launch(layout) as launch:
        url = await asyncio.to_thread(launch.wait_ready)  # noqa: TID251
        async with patient_session(url) as session:
            pids = await pids_by_rank(session)
            with ends_of(pids) as ends:
                await _break(case, launch, session, pids, requests)
                if fault is Fault.METHOD:
                    launch.terminate()  # nothing has ended
                await asyncio.to_thread(launch.wait_end)  # noqa: TID251
                case.ended = {rank: await end for rank, end in ends.items()}
        _read_log(case, launch.log)
        case.num_processes_left = len(launch.pids_left())
    case.shared_memory_left = shared_memory_names() - memory_before
    return case


async def _break(
    case: Case,
    launch: Launch,
    session: aiohttp.ClientSession,
    pids: Mapping[int, int],
    requests: Sequence[KnownRequest],
) -> None:
    """Cause the fault while all streams are under way; return when they have ended."""
    failed = case.layout.coords(case.victim).dp
    streams = Streams(session, requests)
    async with asyncio.TaskGroup() as tasks:
        await streams.start(tasks)
        case.happened = time.monotonic()
        match case.fault:
            case Fault.SIGKILL:
                os.kill(pids[case.victim], signal.SIGKILL)
            case Fault.SIGSTOP:
                os.kill(pids[case.victim], signal.SIGSTOP)
            case Fault.ORPHANED:
                launch.process.kill()
            case _:
                case.caller_saw = await _call(session, case.fault, case.victim)
                assert re.match("200|reset|50[03] rank", case.caller_saw), case.caller_saw
        case.failed_clients = await streams.seen(failed)
        case.other_clients = await streams.seen(1 - failed)


async def _call(session: aiohttp.ClientSession, fault: Fault, victim: int) -> str:
    """What the caller of the breaking method gets."""
    assert fault.method is not None
    args = [victim, 3] if fault is Fault.EXIT else [victim]
    try:
        return await call_method(session, fault.method, *args)
    except aiohttp.ClientError as error:
        return f"reset ({type(error).__name__})"


async def call_method(session: aiohttp.ClientSession, method: str, *args: float) -> str:
    """Status and error message, or the values."""
    body = {"method": method, "args": args, "timeout": 30.0}
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with session.post("/collective_rpc", json=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        said = answer["error"]["message"] if "error" in answer else answer["results"]
        return f"{response.status} {said}"


def _read_log(case: Case, log: str) -> None:
    """When the fault happened on its rank, how ranks ended, whom they blamed."""
    if case.fault.method is not None:
        said = re.search(r"^fault at (\S+)$", log, re.MULTILINE)
        assert said, "the fault did not happen"
        case.happened = float(said[1])
    case.statuses = dict.fromkeys(range(case.layout.launch_world_size), KILLED)
    for status, rank in re.findall(r"exit status (\d+) of rank (\d+)", log):
        case.statuses[int(rank)] = int(status)
    case.first_failures = [line for line in log.splitlines() if "first failure: " in line]


def shared_memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}
