"""The store at which ranks meet when no launcher opened one."""

import asyncio
import dataclasses
import socket
import threading
import time

import pytest
import torch.distributed as dist
from support.launching import free_port

from aioengine.config import EngineConfig
from aioengine.control.deadline import Deadline
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.dist.rendezvous import open_launcher_store
from aioengine.errors import StartupError, StartupTimeoutError
from aioengine.engine.executor import Executor
from aioengine.layout import ParallelLayout
from aioengine.rank.joining import join_launch
from aioengine.rank.place import Place

LIMIT_S = 20.0


def rank_env(rank: int, port: int, *, host: str = "127.0.0.1", job: str = "slurm 7.0") -> LauncherEnv:
    return LauncherEnv(
        kind="srun",
        rank=rank,
        world_size=2,
        local_world_size=2,
        master_addr=host,
        master_port=port,
        master_source="one node, port by SLURM_JOB_ID and SLURM_STEP_ID",
        job=job,
    )


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), LIMIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("localhost", True)])
def test_ranks_meet_and_other_jobs_do_not_disturb(host: str, is_open: bool) -> None:
    port = free_port()
    zero = open_launcher_store(rank_env(0, port, host=host), LIMIT_S)
    one = open_launcher_store(rank_env(1, port, host=host), LIMIT_S)
    other = open_launcher_store(rank_env(1, port, host=host, job="slurm 8.0"), LIMIT_S)
    one.set("hello/1", "fresh")
    assert zero.check(["hello/1"])
    assert zero.get("hello/1") == b"fresh"
    assert not other.check(["hello/1"])
    assert answers("127.0.0.2", port) == is_open  # not only loopback's own address is served


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = rf"port {port} \(one node, port by SLURM_JOB_ID and SLURM_STEP_ID\) is in use"
        with pytest.raises(StartupError, match=f"{expected} .*; set MASTER_PORT to another one"):
            open_launcher_store(rank_env(0, port), LIMIT_S)


def test_rank_0_never_comes() -> None:
    port = free_port()
    before = time.monotonic()
    expected = rf"rank 1 does not reach the launcher's store at 127.0.0.1:{port} .* 1.0 s that were"
    with pytest.raises(StartupTimeoutError, match=expected) as caught:
        open_launcher_store(rank_env(1, port), 1.0)
    assert time.monotonic() - before < LIMIT_S
    assert "\n" not in str(caught.value)


def test_torchrun_is_gone() -> None:
    """Its store was open before the ranks were started, so nobody waits for it."""
    env = dataclasses.replace(rank_env(1, port := free_port()), agent_hosts_store=True)
    with pytest.raises(StartupError, match=f"{port} .*; rank 0 or its launcher is not there"):
        open_launcher_store(env, 1000.0)


async def test_rank_0_is_frozen() -> None:
    """Its port accepts and nobody answers, for which torch's store has no limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Place(
            config=EngineConfig(),
            env=rank_env(1, silent.getsockname()[1]),
            layout=ParallelLayout(tp_size=2),
            address="127.0.0.1",
            executor=Executor,
            startup=Deadline(0.5),
        )
        with pytest.raises(StartupTimeoutError, match="rank 1 does not get an answer .* frozen"):
            await join_launch(place, 2**20)
    for thread in threading.enumerate():  # left behind, it tells this loop when it ends
        if thread.name == open_launcher_store.__name__:
            await asyncio.to_thread(thread.join, LIMIT_S)  # noqa: TID251


def test_rank_0_ends_while_others_ask() -> None:
    port = free_port()
    zero = open_launcher_store(rank_env(0, port), LIMIT_S)
    one = open_launcher_store(rank_env(1, port), LIMIT_S)
    one.set("hello/1", "fresh")
    del zero  # and its server
    with pytest.raises(StartupError, match=f"store at 127.0.0.1:{port} is gone, and rank 0 or"):
        one.check(["answer/1"])


def test_a_trainers_world_that_is_not_the_launch() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(StartupError, match="rank 0 of 1 there, but rank 1 of 2 for the launch"):
            open_launcher_store(rank_env(1, 0), LIMIT_S)
    finally:
        dist.destroy_process_group()
