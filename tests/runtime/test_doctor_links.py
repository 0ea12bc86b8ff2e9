"""The TCP matrix, over real sockets on one host."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.connections import HOST

from aioengine.control.handshake import attempt_key
from aioengine.doctor.links import ALL_PAIRS_UP_TO, NUM_STRIDES, EchoDesk, dial_all, partners
from aioengine.doctor.messages import Target
from aioengine.handshake_messages import Endpoint

KEY = attempt_key(b"secret", "attempt")


@asynccontextmanager
async def desks(num_ranks: int, key: bytes = KEY) -> AsyncIterator[list[Target]]:
    async with asyncio.TaskGroup() as tasks:
        opened = [EchoDesk(tasks, key, rank) for rank in range(num_ranks)]
        try:
            yield [
                Target(rank, os.getpid(), await desk.open(HOST)) for rank, desk in enumerate(opened)
            ]
        finally:
            for desk in opened:
                desk.close()


async def test_every_way_that_works_is_timed() -> None:
    async with desks(20) as targets:
        cells = await dial_all(99, KEY, targets, 5.0)
    assert [(cell.source, cell.target) for cell in cells] == [(99, rank) for rank in range(20)]
    for cell in cells:
        assert not cell.failed, cell
        assert cell.connect_us is not None
        assert cell.round_trip_us is not None
        assert 0 < cell.round_trip_us < 5e6


async def test_a_closed_port_is_told_with_its_errno() -> None:
    async with desks(2) as targets:
        pass
    async with desks(1) as (open_target,):
        cells = await dial_all(9, KEY, [targets[1], open_target], 5.0)
    assert cells[0].failed == "connect"
    assert "111" in cells[0].error
    assert cells[0].round_trip_us is None
    assert not cells[1].failed


async def test_a_process_that_accepts_and_says_nothing_costs_only_the_limit() -> None:
    """As one that is stopped: its kernel accepts."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, HOST, 0)
    silent = Target(1, 1, Endpoint(HOST, server.sockets[0].getsockname()[1]))
    async with desks(1) as (open_target,):
        silent_cell, open_cell = await dial_all(9, KEY, [silent, open_target], 0.3)
    server.close()
    await server.wait_closed()
    assert silent_cell.failed == "proof"
    assert silent_cell.connect_us is not None
    assert "no answer" in silent_cell.error
    assert open_cell.target == 0


async def test_what_there_is_no_time_for_is_not_called_broken() -> None:
    async with desks(2) as targets:
        cells = await dial_all(9, KEY, targets, 0.0)
    assert [cell.failed for cell in cells] == ["untried", "untried"]


async def test_a_stranger_is_told_from_a_rank() -> None:
    async with desks(1, attempt_key(b"another", "attempt")) as targets:
        (cell,) = await dial_all(9, KEY, targets, 5.0)
    assert cell.failed == "proof"
    assert "does not belong to this attempt" in cell.error


async def test_another_rank_at_the_address_is_told() -> None:
    """Hosts that have one address each for themselves, such as that of a bridge."""
    async with desks(1) as (target,):
        wrong = msgspec.structs.replace(target, rank=5)
        (cell,) = await dial_all(9, KEY, [wrong], 5.0)
    assert cell.failed == "echo"
    assert "rank 0 (pid" in cell.error


@pytest.mark.parametrize("num_ranks", [1, 2, 5, ALL_PAIRS_UP_TO])
def test_in_a_small_launch_everybody_dials_everybody(num_ranks: int) -> None:
    ranks = range(num_ranks)
    for rank in ranks:
        assert sorted([rank, *partners(rank, ranks, [])]) == list(ranks)


def test_no_two_ranks_dial_the_same_one_in_the_same_moment() -> None:
    ranks = range(8)
    rounds = zip(*(partners(rank, ranks, []) for rank in ranks), strict=True)
    assert all(len(set(targets)) == len(ranks) for targets in rounds)


def test_missing_ranks_are_not_dialled() -> None:
    assert partners(4, [0, 2, 4, 6], []) == [6, 0, 2]


@pytest.mark.parametrize("num_ranks", [ALL_PAIRS_UP_TO + 1, 512, 4096])
def test_a_large_launch_is_sampled(num_ranks: int) -> None:
    ranks = range(num_ranks)
    mates = [0, num_ranks // 2]
    chosen = partners(0, ranks, mates)
    assert num_ranks // 2 in chosen
    assert 1 in chosen
    assert 0 not in chosen
    assert len(set(chosen)) == len(chosen) <= NUM_STRIDES + len(mates)
