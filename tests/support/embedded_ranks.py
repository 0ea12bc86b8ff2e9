"""A trainer's rank, for torchrun: `python embedded_ranks.py SCENARIO`. Prints what it saw."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import rpc_methods
from support.launching import STORIES, golden

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.errors import EngineError, PhaseTimeoutError, RankLostError, ReplicaFailedError

ROWS = golden("stories260k_greedy")[:4]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def say(text: str) -> None:
    """In one write, as the ranks share a pipe: print() writes an unbuffered line's end apart."""
    sys.stdout.write(f"[program {RANK}] {text}\n")
    sys.stdout.flush()


def config(**settings: Any) -> EngineConfig:
    few = {"model": str(STORIES), "cpu_threads": 1, "heartbeat_seconds": 0.5}
    return EngineConfig(**{**few, **settings})


def train_step() -> None:
    """What a trainer does with its own process group."""
    gradient = torch.full((1000,), float(RANK))
    dist.all_reduce(gradient)
    assert gradient[0].item() == sum(range(WORLD_SIZE))


async def check_answers(engine: AsyncEngine) -> None:
    async with asyncio.TaskGroup() as tasks:
        for row in ROWS:
            tasks.create_task(check_answer(engine, row))


async def check_answer(engine: AsyncEngine, row: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=len(row["token_ids"]))
    (answer,) = await engine.generate(row["prompt_ids"], params).collect()
    assert answer.token_ids == row["token_ids"]


async def rounds(**layout: int) -> None:
    """Generate and train by turns; the trainer's thread is blocked for longer than heartbeats."""
    async with AsyncEngine(config(**layout)) as engine:
        for _ in range(5):
            async with engine.active():
                if engine.is_leader:
                    await check_answers(engine)
            train_step()
            time.sleep(1.0 + 0.1 * RANK)  # noqa: ASYNC251
        async with engine.active():
            if engine.is_leader:
                say(f"ranks {await engine.collective_rpc(rpc_methods.rank_of)}")
    train_step()
    say("done")


RUNG = threading.Event()


def ring(worker: Any) -> None:
    RUNG.set()


async def own_world() -> None:
    """The program brings no torch.distributed; two stages, two replicas."""
    async with AsyncEngine(config(pipeline_parallel_size=2)) as engine, engine.active():
        if engine.is_leader:
            await check_answers(engine)
        else:
            for what in (lambda: engine.generate([1]), lambda: engine.across_replicas):
                try:
                    what()
                except EngineError as error:
                    say(f"refused: {error}")
        if RANK == 0:
            calls = engine.across_replicas
            say(f"ranks {await calls.collective_rpc(rpc_methods.rank_of)}")
            say(f"last {await calls.collective_rpc(rpc_methods.rank_of, unique_reply_rank=1)}")
            await calls.collective_rpc(ring)
        RUNG.wait(30)  # else the other replica would have left
    assert not dist.is_initialized()
    say("done")


async def loss() -> None:
    """Rank 1 dies while the engine generates; the leader's program goes on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, on account of rank 1
    failures: list[EngineError] = []
    engine = AsyncEngine(config(tensor_parallel_size=2), on_failure=failures.append)
    try:
        async with engine, engine.active():
            if RANK == 1:
                await asyncio.sleep(0.5)
                os._exit(3)
            await use_until_lost(engine)
    except ReplicaFailedError as error:  # from leaving active()
        say(f"later: {error}")
    say(f"on_failure: {[type(error).__name__ for error in failures]}; the program goes on")


async def use_until_lost(engine: AsyncEngine) -> None:
    try:
        while True:
            await engine.generate(ROWS[0]["prompt_ids"], ENDLESS).collect()
    except RankLostError as error:
        say(f"in flight: {error}")
    for later in (
        engine.generate(ROWS[0]["prompt_ids"], ENDLESS).collect,
        lambda: engine.collective_rpc("rank_info"),
    ):
        try:
            await later()
        except ReplicaFailedError as error:
            say(f"later: {error}")


async def leaves_by_an_error(culprit: int) -> None:
    """A rank's program raises; the others hear of it in their calls, and nobody waits."""
    try:
        async with AsyncEngine(config(tensor_parallel_size=2)) as engine:
            if culprit == RANK:
                raise ZeroDivisionError("mine")
            async with engine.active():
                say("never")
    except ReplicaFailedError as error:
        say(f"told: {error}")
    except ZeroDivisionError:
        say("own error")


async def leaves_within_a_phase() -> None:
    """A peer's program raises in a phase that its leader does not leave by itself."""
    try:
        async with AsyncEngine(config(tensor_parallel_size=2)) as engine, engine.active():
            if RANK == 1:
                raise ZeroDivisionError("mine")
            while True:
                await engine.generate(ROWS[0]["prompt_ids"], ENDLESS).collect()
    except ReplicaFailedError as error:
        say(f"told: {error}")
    except ZeroDivisionError:
        say("own error")


async def failures_in_a_row() -> None:
    """Engines that fail, in one process after the other, leave nothing; the next one works."""
    await leaves_by_an_error(1)
    before = open_files()
    for _ in range(3):
        await leaves_within_a_phase()
    gc.collect()
    say(f"left: {open_files() - before}, {[thread.name for thread in threading.enumerate()][1:]}")
    async with AsyncEngine(config(tensor_parallel_size=2)) as engine:
        async with engine.active():
            if engine.is_leader:
                await check_answers(engine)
        if engine.is_leader:
            try:
                async with engine.active():
                    say("never")
            except EngineError as error:
                say(f"alone: {error}")
    train_step()


def open_files() -> Counter[str]:
    """By kind: sockets, memory, event descriptors."""
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return Counter(str(link.readlink()).partition(":[")[0] for link in links if link.is_symlink())


async def late() -> None:
    """A rank that does not enter a phase is named, and may come later."""
    async with AsyncEngine(config(tensor_parallel_size=2)) as engine:
        if RANK == 0:
            try:
                async with engine.active(timeout=0.2):
                    say("never")
            except PhaseTimeoutError as error:
                say(f"late: {error}")
        dist.barrier()  # rank 1 comes when rank 0 has given up
        async with engine.active():
            if engine.is_leader:
                await check_answers(engine)
    say("done")


SCENARIOS = {
    "tp2": lambda: rounds(tensor_parallel_size=2),
    "pp2": lambda: rounds(pipeline_parallel_size=2),
    "dp2": lambda: rounds(),
    "own_world": own_world,
    "loss": loss,
    "leader_leaves": lambda: leaves_by_an_error(0),
    "peer_leaves": lambda: leaves_by_an_error(1),
    "failures": failures_in_a_row,
    "late": late,
}

if __name__ == "__main__":
    if sys.argv[1] != "own_world":
        dist.init_process_group("gloo")
    asyncio.run(SCENARIOS[sys.argv[1]]())
    os._exit(0)  # without waiting for threads of a group that has lost a rank
