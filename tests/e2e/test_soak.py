"""Hours of service in miniature, on pp2·dp2. AIOENGINE_TEST_SOAK_SECONDS says how long."""

import os
import random
import time

import pytest
from support.known_requests import known_requests
from support.launching import STORIES, Launch
from support.soak import Footprint, Soak

pytestmark = [
    pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model"),
    pytest.mark.chaos,
]

SOAK_S = float(os.environ.get("AIOENGINE_TEST_SOAK_SECONDS", "120"))
MIN_STEPS = 2000
"""Of each replica, even if that takes longer."""
RSS_GROWTH_BYTES = 2 * 2**20
"""Of a rank, from the second third of the rounds to the last: in ten minutes (1,000 requests and
10,000 steps in each third) the allocator took up to 0.75 MiB more. What this finds in that time:
2 KiB lost per request, 200 bytes per step."""
FD_GROWTH = 2
"""The connection of a client that has just left may not be closed yet."""


async def test_nothing_grows() -> None:
    requests = await known_requests(num_requests=8, max_tokens=200)
    with Launch("--model", str(STORIES), "-pp", "2", num_ranks=4) as launch:
        soak = Soak(launch.wait_ready(), requests, random.Random(SOAK_S))
        prints: list[Footprint] = []
        started = time.monotonic()
        while time.monotonic() - started < SOAK_S or min(prints[-1].last_steps) < MIN_STEPS:
            prints.append(await soak.round())
            assert not soak.bad, "\n".join(map(str, soak.bad))
            assert not prints[-1].num_blocks_held
            print(f"{time.monotonic() - started:5.0f} s {prints[-1]}")
        launch.terminate()
        launch.wait_end()
        assert launch.log.count("ended in order") == 4
        assert not launch.pids_left()
    print(dict(soak.endings))
    third = len(prints) // 3
    middle, last = prints[third : 2 * third], prints[2 * third :]
    for rank in prints[0].num_fds:
        assert most_rss(last, rank) <= most_rss(middle, rank) + RSS_GROWTH_BYTES
        assert most_fds(last, rank) <= most_fds(middle, rank) + FD_GROWTH


def most_rss(prints: list[Footprint], rank: int) -> int:
    return max(one.rss_bytes[rank] for one in prints)


def most_fds(prints: list[Footprint], rank: int) -> int:
    return max(one.num_fds[rank] for one in prints)
