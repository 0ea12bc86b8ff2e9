"""Rank 0's side of an examination: what every rank is asked, and who falls silent.

Every part has a limit. A rank that does not answer within it is left out of what follows, so that
the others are still examined.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

from aioengine.config import EngineConfig
from aioengine.control.watch import kill_if_here
from aioengine.doctor.examination import Examination
from aioengine.doctor.guests import NUM_EXCHANGES, Guests
from aioengine.doctor.links import ALL_PAIRS_UP_TO, partners
from aioengine.doctor.messages import (
    Dial,
    Dialled,
    Measure,
    Measured,
    OpenStore,
    StoreOpened,
    Target,
    Timing,
)
from aioengine.handshake_messages import Endpoint
from aioengine.layout import Axis, ParallelLayout
from aioengine.messages import RankInfo

log = logging.getLogger(__name__)

AFTER_GATHERING_S: Final = 27.0
"""For everything after the ranks have come: with the default limit, a run ends within a minute."""
MATE_AXES: Final[tuple[Axis, ...]] = ("tp", "pcp", "pp")
"""Whose groups talk in every step: in a large launch, too, all their ways are tried."""
ANNOUNCE_AFTER_S: Final = 3.0
"""Then a person wants to know who is being waited for."""
CLOCK_LIMIT_S: Final = 3.0
DIAL_LIMIT_S: Final = 9.0
DEVICE_LIMIT_S: Final = 15.0
"""A driver that nobody keeps loaded takes seconds to initialise its accelerators."""
GROUPS_LIMIT_S: Final = 15.0
MIN_GROUPS_S: Final = 5.0
"""With less time left than this, groups that are well might not get ready."""
OWN_LIMIT_SHARE: Final = 0.7
"""Of rank 0's limit, that ranks keep themselves, so that their reasons arrive before it ends."""
RECHECK_LIMIT_S: Final = 1.0
GOODBYE_LIMIT_S: Final = 1.0


class Examiner:
    """Examines every rank of a launch once, and then tells all of them the verdict."""

    def __init__(self, config: EngineConfig, layout: ParallelLayout) -> None:
        self._limit_s = config.startup_timeout_seconds
        self._kill_frozen = config.kill_frozen
        self._layout = layout
        self._began = time.monotonic()
        self._end = self._began + self._limit_s + AFTER_GATHERING_S
        self._found = Examination(
            world_size=layout.launch_world_size,
            sizes={name.removesuffix("_size"): size for name, size in asdict(layout).items()},
            limit_s=self._limit_s,
            requests_wanted=config.max_concurrent_requests,
        )
        self.guests = Guests(config, self._found, self._end)

    async def examine(self) -> Examination:
        """Everything, within `--startup-timeout-seconds` and AFTER_GATHERING_S."""
        for part in (
            self._gather,
            self._compare_clocks,
            self._dial,
            self._wait_devices,
            self._measure_groups,
            self._recheck,
        ):
            if not self._found.interrupted:
                await part()
        self._found.seconds = round(time.monotonic() - self._began, 2)
        return self._found

    async def dismiss(self, exit_status: int) -> None:
        """A process of this host that is frozen, so that it does not hear the verdict, is killed as
        in a real launch: whoever started it waits for it."""
        for guest in await self.guests.dismiss(exit_status, GOODBYE_LIMIT_S):
            if guest.person.silent_in and self._kill_frozen:
                facts = guest.facts
                info = RankInfo(facts.rank, facts.coords, facts.host, facts.pid)
                kill_if_here(info, socket.gethostname())

    async def _gather(self) -> None:
        found = self._found
        limit_s = min(ANNOUNCE_AFTER_S, self._limit_s)
        if await self.guests.wait(lambda: not found.missing, limit_s) or found.interrupted:
            return
        left_s = max(0.0, self._limit_s - (time.monotonic() - self._began))
        log.warning("waits for rank %s (%.0f s left)", ", ".join(map(str, found.missing)), left_s)
        await self.guests.wait(lambda: not found.missing, left_s)

    async def _compare_clocks(self) -> None:
        guests = self.guests.able()
        for guest in guests:
            guest.ping(0)
        await self.guests.wait(
            lambda: all(g.num_pongs == NUM_EXCHANGES or g.is_gone for g in guests), CLOCK_LIMIT_S
        )
        self.guests.mark_silent((g for g in guests if not g.num_pongs), "the first exchange")

    async def _dial(self) -> None:
        """The TCP matrix. Silent ranks are dialled, too: their host may accept connections."""
        guests, found = self.guests.able(), self._found
        ranks = sorted(rank for rank, guest in self.guests.by_rank.items() if not guest.is_gone)
        found.is_sample = len(ranks) > ALL_PAIRS_UP_TO
        limit_s = min(DIAL_LIMIT_S, max(1.0, self._end - time.monotonic()))
        for guest in guests:
            mates = [mate for axis in MATE_AXES for mate in self._layout.group(axis, guest.rank)]
            targets = tuple(self._targets(partners(guest.rank, ranks, mates)))
            found.num_pairs_asked += len(targets)
            guest.link.send(Dial(targets, OWN_LIMIT_SHARE * limit_s))
        replies = await self.guests.replies(guests, Dialled, limit_s)
        self.guests.mark_silent((g for g in guests if g.rank not in replies), "the TCP matrix")
        for reply in replies.values():
            found.cells += reply.cells

    def _targets(self, ranks: Sequence[int]) -> Iterator[Target]:
        for rank in ranks:
            facts = self.guests.by_rank[rank].facts
            if facts.probe is not None:
                yield Target(rank, facts.pid, facts.probe)

    async def _wait_devices(self) -> None:
        """Ranks open them by themselves."""
        guests = self.guests.able()
        await self.guests.wait(
            lambda: all(g.person.device is not None or g.is_gone for g in guests), DEVICE_LIMIT_S
        )

    # --- process groups

    async def _measure_groups(self) -> None:
        if self._layout.world_size == 1:
            return
        async with asyncio.TaskGroup() as tasks:
            for leader in self._layout.leaders:
                ranks = self._layout.replica(leader)
                if obstacle := self._obstacle(ranks):
                    name = f"ranks {ranks[0]} to {ranks[-1]}"
                    self._found.unmeasured.append(f"{name}: {obstacle}")
                else:
                    tasks.create_task(self._measure_replica(ranks), name=f"replica of {leader}")

    def _obstacle(self, ranks: range) -> str:
        """Why building the groups of a replica would only hang or fail; empty if nothing is known.

        The findings say more of each of these.
        """
        for rank in ranks:
            guest = self.guests.by_rank.get(rank)
            if guest is None:
                return f"rank {rank} is not here"
            if not guest.is_able:
                return f"rank {rank} no longer answers"
            if guest.person.differences:
                return f"rank {rank} has other settings than rank 0"
            device = guest.person.device
            if device is None or device.error:
                return f"rank {rank} has no device"
        for cell in self._found.cells:
            if cell.failed and cell.source in ranks and cell.target in ranks:
                return f"rank {cell.source} does not reach rank {cell.target}"
        if self._end - time.monotonic() < MIN_GROUPS_S:
            return "no time is left"
        return ""

    async def _measure_replica(self, ranks: range) -> None:
        guests = [self.guests.by_rank[rank] for rank in ranks]
        leader = guests[0]
        limit_s = min(GROUPS_LIMIT_S, self._end - RECHECK_LIMIT_S - time.monotonic())
        leader.link.send(OpenStore())
        leader.is_measuring = True
        opened = (await self.guests.replies([leader], StoreOpened, limit_s)).get(leader.rank)
        if opened is None:
            return
        if opened.error:
            leader.person.failed, leader.is_measuring = opened.error, False
            return
        store = Endpoint(leader.facts.address, opened.port)
        for guest in guests:
            guest.link.send(Measure(store, OWN_LIMIT_SHARE * limit_s))
            guest.is_measuring = True
        replies = await self.guests.replies(guests, Measured, limit_s)
        for rank, reply in replies.items():
            self.guests.by_rank[rank].person.failed = reply.error
            self.guests.by_rank[rank].is_measuring = False
        self._found.timings += slowest(t for reply in replies.values() for t in reply.timings)

    async def _recheck(self) -> None:
        """Tell a process that is stopped from one whose device thread alone hangs."""
        owing = [g for g in self.guests.able() if g.person.device is None or g.is_measuring]
        before = {guest.rank: guest.num_pongs for guest in owing}
        for guest in owing:
            guest.ping(NUM_EXCHANGES - 1)
        await self.guests.wait(
            lambda: all(g.num_pongs > before[g.rank] or g.is_gone for g in owing), RECHECK_LIMIT_S
        )
        for guest in owing:
            if guest.num_pongs > before[guest.rank]:
                guest.person.stuck_in = guest.doing
        silent = (g for g in owing if g.num_pongs == before[g.rank])
        self.guests.mark_silent(silent, "the process groups")


def slowest(timings: Iterable[Timing]) -> list[Timing]:
    """One timing for each group, operation and backend: the slowest member's."""
    found: dict[tuple[object, ...], Timing] = {}
    for timing in timings:
        key = (timing.group, timing.ranks, timing.operation, timing.backend)
        found[key] = max(found.get(key, timing), timing, key=lambda t: t.latency_us or 0.0)
    return list(found.values())
