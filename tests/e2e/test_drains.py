"""SIGTERM at a random moment under load: no accepted request is lost, every rank ends with 0."""

import asyncio
import math
import random
import sys

import aiohttp
import pytest
from support.known_requests import KnownRequest, known_requests
from support.launching import STORIES, Launch, rank_command
from support.sightings import Sighting, patient_session, summary, watch

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_CLIENTS = 12
"""Each sends one request after the other; every third does not stream."""
NUM_REQUESTS = 8
MAX_TOKENS = 200
MAX_EVENTS = 1200
"""SIGTERM comes after fewer events of all streams together, perhaps after none."""
SIMULTANEOUS_S = 0.1
"""The drain is over when the last answer is sent: who comes then finds nobody, or is just not
accepted any more, perhaps because the client saw the end of that answer a little late."""
SERVE = [sys.executable, "-m", "aioengine.cli", "serve"]
STARTS = {
    # name: command, flags, number of ranks, exit status of the launcher on SIGTERM
    "one rank": (rank_command(1), (), 1, 0),
    "torchrun pp2": (rank_command(2), ("-pp", "2"), 2, 1),
    "torchrun dp2": (rank_command(2), (), 2, 1),
    "serve tp2": (SERVE, ("-tp", "2"), 2, 0),
}
CASES = [(seed, start) for seed in range(10) for start in STARTS]
CI_CASES = [(0, "torchrun pp2"), (1, "one rank")]


class Load:
    """Clients that send requests until they are turned away."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        requests: list[KnownRequest],
        chance: random.Random,
        num_events: int,
    ) -> None:
        """`has_come` is set once the streams have got `num_events` events together."""
        self.has_come = asyncio.Event()
        self.seen: list[Sighting] = []
        self._session = session
        self._requests = requests
        self._chance = chance
        self._num_events_left = num_events
        self._note_event(0)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(NUM_CLIENTS):
                tasks.create_task(self._send_requests(stream=index % 3 != 0))

    async def _send_requests(self, *, stream: bool) -> None:
        is_served = True
        while is_served:
            request = self._chance.choice(self._requests)
            request = request.first(self._chance.randrange(1, MAX_TOKENS))
            sighting = await watch(
                self._session, request, stream=stream, on_tokens=self._note_event
            )
            self.seen.append(sighting)
            is_served = sighting.ending == "finished"

    def _note_event(self, num_events: int = 1) -> None:
        self._num_events_left -= num_events
        if self._num_events_left <= 0:
            self.has_come.set()


@pytest.mark.parametrize(
    ("seed", "start"),
    [pytest.param(*case, marks=[] if case in CI_CASES else pytest.mark.chaos) for case in CASES],
)
async def test_nothing_accepted_is_lost(seed: int, start: str) -> None:
    requests = await known_requests(NUM_REQUESTS, MAX_TOKENS)
    chance = random.Random(f"{start} {seed}")
    command, flags, num_ranks, status = STARTS[start]
    with Launch("--model", str(STORIES), *flags, command=command) as launch:
        async with patient_session(launch.wait_ready()) as session, asyncio.TaskGroup() as tasks:
            load = Load(session, requests, chance, chance.randrange(MAX_EVENTS))
            tasks.create_task(load.run())
            await load.has_come.wait()
            launch.terminate()
        assert launch.wait_end() == status
        assert launch.log.count("ended in order") == num_ranks
        assert not launch.pids_left()
    print(f"{start} {seed}: {summary(load.seen)}")
    assert all(seen.is_right for seen in load.seen)
    last_answer = max(
        (seen.ended for seen in load.seen if seen.ending == "finished"), default=-math.inf
    )
    for seen in load.seen:
        came_too_late = seen.started > last_answer - SIMULTANEOUS_S and not seen.token_ids
        turned_away = ("refused", "unreachable", "reset") if came_too_late else ("refused",)
        assert seen.ending in ("finished", *turned_away), seen
