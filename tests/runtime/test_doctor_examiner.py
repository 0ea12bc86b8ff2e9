"""Rank 0 examines whoever comes: what each does wrong ends up under its name, and ends nobody."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from support.examinations import HEALTHY_DEVICE, facts, person
from support.mailbox import settle

from aioengine.config import EngineConfig
from aioengine.control.channel import MemoryLink
from aioengine.doctor import examiner
from aioengine.doctor.examination import Examination
from aioengine.doctor.examiner import Examiner, slowest
from aioengine.doctor.guests import NUM_EXCHANGES, Guest
from aioengine.doctor.meeting import Note
from aioengine.doctor.messages import (
    Cell,
    Claim,
    Dial,
    Dialled,
    Measure,
    Measured,
    OpenStore,
    Order,
    Ping,
    Pong,
    StoreOpened,
    Timing,
    Verdict,
)
from aioengine.layout import ParallelLayout

CONFIG = EngineConfig(startup_timeout_seconds=0.25)
LAYOUT = ParallelLayout(tp_size=2)
AHEAD_NS = 3 * 10**9


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLOCK_LIMIT_S", "DIAL_LIMIT_S", "DEVICE_LIMIT_S", "GROUPS_LIMIT_S"):
        monkeypatch.setattr(examiner, name, 0.15)
    monkeypatch.setattr(examiner, "RECHECK_LIMIT_S", 0.1)


class FakePatient:
    """A rank that does everything right, but for the orders that it is told to `ignore`."""

    def __init__(
        self,
        rank: int,
        *,
        ignore: Sequence[type] = (),
        config: EngineConfig = CONFIG,
        **changes: Any,
    ) -> None:
        self.facts = facts(rank, world_size=2, **changes)
        self.ignore = list(ignore)
        self.config = config
        self.has_device = True
        self.error = ""
        self.ahead_ns = 0
        self.on_order: Callable[[Any], None] = lambda order: None
        self.verdict: int | None = None
        self.link, self.far_end = MemoryLink.pair(asyncio.get_running_loop())
        self.link.start(Order, self._obey, lambda reason: None)

    def come(self) -> None:
        self.link.send(Claim(self.facts, msgspec.json.encode(self.config)))
        if self.has_device:
            self.link.send(HEALTHY_DEVICE)

    def leave(self) -> None:
        self.link.close()

    def _obey(self, order: Any) -> None:
        self.on_order(order)
        if type(order) in self.ignore:
            return
        rank, send = self.facts.rank, self.link.send
        match order:
            case Ping():
                now_ns = time.time_ns() + self.ahead_ns
                send(Pong(order.number, now_ns, now_ns, "a kernel"))
            case Dial():
                cells = [
                    Cell(source=rank, target=t.rank, round_trip_us=50.0) for t in order.targets
                ]
                send(Dialled(tuple(cells)))
            case OpenStore():
                send(StoreOpened(4))
            case Measure():
                send(Measured((timing((0, 1), 10.0 * (rank + 1)),), self.error))
            case Verdict():
                self.verdict = order.exit_status
                self.leave()


def timing(ranks: tuple[int, ...], latency_us: float) -> Timing:
    return Timing(
        group="tp:0",
        ranks=ranks,
        operation="all_reduce",
        backend="gloo",
        latency_us=latency_us,
        gb_per_s=1.0,
    )


async def examine(*patients: FakePatient) -> Examination:
    """All of them come, are examined, and hear a verdict."""
    subject = Examiner(CONFIG, LAYOUT)
    for patient in patients:
        subject.guests.welcome(patient.far_end, patient.facts.rank)
        patient.come()
    found = await subject.examine()
    await subject.dismiss(1)
    for patient in patients:
        patient.leave()
    return found


@asynccontextmanager
async def examining(*patients: FakePatient) -> AsyncIterator[Examiner]:
    """The examination is going on."""
    subject = Examiner(CONFIG, LAYOUT)
    for patient in patients:
        subject.guests.welcome(patient.far_end, patient.facts.rank)
        patient.come()
    yield subject
    for patient in patients:
        patient.leave()


async def test_two_ranks_that_are_well() -> None:
    patients = [FakePatient(0), FakePatient(1)]
    found = await examine(*patients)
    assert found.missing == []
    assert all(p.device is HEALTHY_DEVICE for p in found.ranks.values())
    assert {(cell.source, cell.target) for cell in found.cells} == {(0, 1), (1, 0)}
    assert found.num_pairs_asked == 2
    assert found.timings == [timing((0, 1), 20.0)]
    assert found.unmeasured == []
    assert [patient.verdict for patient in patients] == [1, 1]
    for one in found.ranks.values():
        assert [one.left, one.silent_in, one.stuck_in, one.failed] == [""] * 4


async def test_a_clock_that_is_ahead_is_measured() -> None:
    patients = [FakePatient(0), FakePatient(1)]
    patients[1].ahead_ns = AHEAD_NS
    found = await examine(*patients)
    clock = found.ranks[1].clock
    assert clock is not None
    assert clock.offset_ms == pytest.approx(AHEAD_NS / 1e6, abs=clock.error_ms + 0.01)


async def test_a_missing_rank_leaves_the_others_examined() -> None:
    found = await examine(FakePatient(0))
    assert found.missing == [1]
    assert found.ranks[0].clock is not None
    assert found.unmeasured == ["ranks 0 to 1: rank 1 is not here"]


async def test_whoever_comes_again_is_kept_and_hears_the_verdict() -> None:
    first, again = FakePatient(1), FakePatient(1, pid=5)
    found = await examine(FakePatient(0), first, again)
    assert found.ranks[1].facts == first.facts
    assert [person.facts for person in found.again] == [again.facts]
    assert again.verdict == 1


async def test_a_process_of_a_launch_of_another_size_is_no_rank() -> None:
    stray = FakePatient(1)
    stray.facts = msgspec.structs.replace(stray.facts, world_size=8)
    found = await examine(FakePatient(0), stray)
    assert found.missing == [1]
    assert [person.facts for person in found.strays] == [stray.facts]


async def test_a_note_ends_the_wait_for_its_rank() -> None:
    patient = FakePatient(0)
    async with examining(patient) as subject:
        subject.guests.on_note(Note(facts(1), "refused"))
        found = await subject.examine()
    assert found.missing == []
    assert found.cut_off[0].reason == "refused"
    assert found.unmeasured == ["ranks 0 to 1: rank 1 is not here"]


@pytest.mark.parametrize(
    ("ignored", "where"),
    [
        ([Ping], "the first exchange"),
        ([Dial], "the TCP matrix"),
    ],
)
async def test_a_rank_that_falls_silent_is_left_out(ignored: list[type], where: str) -> None:
    found = await examine(FakePatient(0), FakePatient(1, ignore=ignored))
    assert found.ranks[1].silent_in == where
    assert not found.ranks[0].silent_in
    assert found.unmeasured == ["ranks 0 to 1: rank 1 no longer answers"]


@pytest.mark.parametrize("kill_frozen", [True, False])
async def test_a_frozen_process_of_this_host_is_not_left_behind(
    kill_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever started it would wait for it. One that has read the verdict ends by itself."""
    killed: list[int] = []
    monkeypatch.setattr(examiner, "kill_if_here", lambda info, host: killed.append(info.pid))
    monkeypatch.setattr(examiner, "GOODBYE_LIMIT_S", 0.1)
    config = msgspec.structs.replace(CONFIG, kill_frozen=kill_frozen)
    frozen = FakePatient(1, ignore=[Ping, Verdict], config=config, pid=4321)
    subject = Examiner(config, LAYOUT)
    for patient in (FakePatient(0, config=config), frozen):
        subject.guests.welcome(patient.far_end, patient.facts.rank)
        patient.come()
    await subject.examine()
    await subject.dismiss(1)
    assert killed == ([4321] if kill_frozen else [])


async def test_a_process_that_stops_in_its_groups_is_told_from_a_hanging_device_thread() -> None:
    stopped, hanging = FakePatient(0, ignore=[Measure]), FakePatient(1, ignore=[Measure])

    def stop(order: Any) -> None:
        if isinstance(order, Measure):
            stopped.ignore.append(Ping)

    stopped.on_order = stop
    found = await examine(stopped, hanging)
    assert found.ranks[0].silent_in == "the process groups"
    assert found.ranks[1].stuck_in == "a kernel"
    assert not found.ranks[1].silent_in


async def test_a_leader_that_hangs_in_the_store_is_named() -> None:
    found = await examine(FakePatient(0, ignore=[OpenStore]), FakePatient(1))
    assert found.ranks[0].stuck_in == "a kernel"
    assert not found.ranks[1].stuck_in
    assert found.timings == []


async def test_an_answer_to_a_ping_that_was_given_up_does_not_count() -> None:
    link, _ = MemoryLink.pair(asyncio.get_running_loop())
    guest = Guest(link, person(1))
    guest.person.clock = None
    guest.ping(0)
    guest.ping(NUM_EXCHANGES - 1)
    guest.on_answer(Pong(0, 0, 0, "long ago"))
    assert guest.person.clock is None
    assert guest.num_pongs == 0
    guest.on_answer(Pong(NUM_EXCHANGES - 1, time.time_ns(), time.time_ns(), "now"))
    assert guest.person.clock is not None
    assert guest.doing == "now"


async def test_a_device_that_does_not_open_keeps_the_groups_from_being_built() -> None:
    patient = FakePatient(1)
    patient.has_device = False
    found = await examine(FakePatient(0), patient)
    assert found.ranks[1].device is None
    assert found.ranks[1].stuck_in == "a kernel"
    assert found.unmeasured == ["ranks 0 to 1: rank 1 has no device"]


async def test_an_error_in_the_groups_is_kept() -> None:
    patient = FakePatient(1)
    patient.error = "RuntimeError: no route"
    found = await examine(FakePatient(0), patient)
    assert found.ranks[1].failed == "RuntimeError: no route"
    assert not found.ranks[0].failed


async def test_other_settings_keep_the_groups_from_being_built() -> None:
    other = FakePatient(1, config=msgspec.structs.replace(CONFIG, block_size=32))
    found = await examine(FakePatient(0), other)
    assert found.ranks[1].differences == ("block_size: 16 != 32",)
    assert found.unmeasured == ["ranks 0 to 1: rank 1 has other settings than rank 0"]


async def test_settings_of_another_version_count_as_different() -> None:
    other = FakePatient(1)
    subject = Examiner(CONFIG, LAYOUT)
    subject.guests.welcome(other.far_end, 1)
    other.link.send(Claim(other.facts, b'{"block_size": "many"}'))
    found = await subject.examine()
    other.leave()
    assert "unreadable settings" in found.ranks[1].differences[0]


async def test_a_rank_that_leaves_is_told_with_the_reason() -> None:
    leaving = FakePatient(1)
    leaving.on_order = lambda order: leaving.leave() if isinstance(order, Dial) else None
    found = await examine(FakePatient(0), leaving)
    assert found.ranks[1].left == "connection closed"
    assert found.unmeasured == ["ranks 0 to 1: rank 1 no longer answers"]


async def test_a_signal_ends_the_wait_and_keeps_what_is_known() -> None:
    patient = FakePatient(0)
    async with examining(patient) as subject, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(subject.examine())
        await settle()
        subject.guests.interrupt("SIGTERM")
        found = await running
    assert found.interrupted == "SIGTERM"
    assert found.missing == [1]
    assert found.seconds < CONFIG.startup_timeout_seconds
    assert not found.ranks[0].silent_in


def test_the_slowest_member_speaks_for_a_group() -> None:
    timings = [timing((0, 1), 5.0), timing((0, 1), 9.0), timing((2, 3), 7.0)]
    assert slowest(timings) == [timing((0, 1), 9.0), timing((2, 3), 7.0)]
