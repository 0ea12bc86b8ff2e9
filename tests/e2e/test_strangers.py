"""Whoever connects to a port of a launch and does not belong to it: dropped and named, no more."""

import asyncio
import re
import secrets
from contextlib import ExitStack
from typing import Final

import aiohttp
import pytest
from support.launching import END_S, STORIES, Launch
from support.open_ports import listening_ports
from support.single_ranks import SingleRanks, new_store
from support.strangers import JUNK, Tap, intrude, keep_open

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

FLAGS: Final = ("--model", str(STORIES), "-tp", "2")
PROMPT: Final = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def control_port(launch: Launch) -> int:
    return int(launch.wait_line(r"control port 127\.0\.0\.1:(\d+) expects")[1])


def attack(launch: Launch, port: int, handshake: list[bytes]) -> None:
    """Each of these is dropped with a line that says who it was."""
    recorded = b"".join(handshake)
    hello, proof, _ = handshake
    strangers = [intrude(port, data, hang_up=not data) for data in JUNK.values()]
    strangers += [intrude(port, secrets.token_bytes(2**12)) for _ in range(5)]
    strangers.append(intrude(port, recorded))
    for cut in (1, 4, 5, len(hello) - 1, len(hello), len(hello) + 7, len(hello + proof) - 1):
        strangers.append(intrude(port, recorded[:cut], hang_up=True))
        intrude(port, recorded[:cut], reset=True)  # whose address may be gone when it is accepted
    for stranger in strangers:
        launch.wait_line(rf"dropped a control connection from 127\.0\.0\.1:{stranger}: ", END_S)
    assert re.search(r"wrong proof for rank \d as member", launch.log)


async def check_serves(url: str, num_replicas: int) -> None:
    async with aiohttp.ClientSession(url) as session:
        for dp_rank in range(num_replicas):
            async with session.post(
                "/v1/completions", json=PROMPT, headers={"X-data-parallel-rank": str(dp_rank)}
            ) as response:
                answer = await response.json()
                assert response.status == 200, answer
                assert answer["choices"][0]["finish_reason"] == "length"


async def test_strangers_at_control_ports_during_start_up() -> None:
    """Rank 0's port and another leader's, while rank 3 has not come; strangers that stay connected
    keep nobody out."""
    with SingleRanks(4, *FLAGS) as ranks, ExitStack() as stack:
        zero, two = ranks.start(0), ranks.start(2)
        aside = new_store()
        tap = Tap(aside, ranks.store, 1)
        ranks.start(1, aside)
        handshake = await asyncio.to_thread(tap.handshake)  # noqa: TID251
        for launch in (zero, two):
            port = control_port(launch)
            attack(launch, port, handshake)
            for data in (b"", b"\0\0", handshake[0]):
                stack.enter_context(keep_open(port, data))
        ranks.start(3)
        url = zero.wait_ready()
        await check_serves(url, 2)
        for launch in (zero, two):
            assert control_port(launch) not in listening_ports(launch.process.pid)
            assert "first failure" not in launch.log
        zero.terminate()
        for launch in ranks.launches.values():
            assert launch.wait_end() == 0
            assert "ended in order" in launch.log


async def test_strangers_at_whatever_port_is_open_after_ready() -> None:
    """HTTP, and what torch's libraries listen on."""
    with Launch(*FLAGS, num_ranks=2) as launch:
        url = launch.wait_ready()
        await check_serves(url, 1)
        pids = sorted(launch.pids_left())
        ranks = [pid for pid in pids if pid != launch.process.pid]
        ports = {port.port for pid in ranks for port in listening_ports(pid)}
        for port in ports:
            for data in (*JUNK.values(), secrets.token_bytes(2**12)):
                intrude(port, data, reset=True)
            keep_open(port, b"\1").close()
        await check_serves(url, 1)
        assert sorted(launch.pids_left()) == pids
        launch.terminate()
        launch.wait_end()
        assert launch.log.count("ended in order") == 2
