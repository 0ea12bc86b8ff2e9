"""Long mixed load on one launch, in rounds; what the launch holds is measured between them."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from support.known_requests import KnownRequest
from support.launching import wait_metrics
from support.sightings import Sighting, patient_session, watch

MAX_BURST: Final = 40
"""Requests at once; a round has one to three bursts, one into the other."""
MAX_GAP_S: Final = 1.5
"""Between the bursts of a round."""
SLOW_PAUSE_S: Final = 0.03
"""A slow reader is behind the step loop after a few tokens."""
SMALL_BUFFER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Footprint:
    """What every rank holds when nothing is in flight. By rank, but for the blocks."""

    rss_bytes: dict[int, int]
    num_fds: dict[int, int]
    num_blocks_held: int
    last_steps: list[int]
    """Of each replica."""


@dataclass(slots=True)
class Soak:
    """`bad` are the requests that got a wrong token, or ended as they should not."""

    url: str
    requests: Sequence[KnownRequest]
    chance: random.Random
    endings: Counter[str] = field(default_factory=Counter)
    bad: list[Sighting] = field(default_factory=list)

    async def round(self) -> Footprint:
        """Bursts with gaps, everything over at the end."""
        async with (
            patient_session(self.url) as quick,
            patient_session(self.url, buffer_bytes=SMALL_BUFFER_BYTES) as slow,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self.chance.randrange(1, 4)):
                for _ in range(self.chance.randrange(1, MAX_BURST)):
                    tasks.create_task(self._client(quick, slow))
                await asyncio.sleep(self.chance.uniform(0, MAX_GAP_S))
        async with patient_session(self.url) as session:
            return await footprint(session)

    async def _client(self, quick: aiohttp.ClientSession, slow: aiohttp.ClientSession) -> None:
        request = self.chance.choice(self.requests)
        request = request.first(self.chance.randrange(1, len(request.token_ids) + 1))
        manner = self.chance.choice(["reads", "reads", "waits", "leaves", "leaves", "is slow"])
        match manner:
            case "waits":
                seen = await watch(quick, request, stream=False)
            case "leaves":
                seen = await watch(quick, request, leave_after=self.chance.randrange(1, 30))
            case "is slow":
                seen = await watch(slow, request, pause_s=SLOW_PAUSE_S)
            case _:
                seen = await watch(quick, request)
        self.endings[f"{manner}: {seen.ending}"] += 1
        if not seen.is_right or seen.ending not in ("finished", "left"):
            self.bad.append(seen)


async def footprint(session: aiohttp.ClientSession) -> Footprint:
    await wait_metrics(session, num_requests_running=0, num_requests_waiting=0)
    async with session.get("/server_info") as response:
        replicas = (await response.json())["replicas"]
    pids = {rank["rank"]: rank["pid"] for replica in replicas for rank in replica["ranks"]}
    return Footprint(
        rss_bytes={rank: rss_bytes(pid) for rank, pid in pids.items()},
        num_fds={rank: num_fds(pid) for rank, pid in pids.items()},
        num_blocks_held=sum(r["num_kv_blocks"] - r["num_free_kv_blocks"] for r in replicas),
        last_steps=[replica["last_step"] for replica in replicas],
    )


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def num_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
