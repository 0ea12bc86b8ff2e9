"""Train and generate by turns, in the same processes.

    torchrun --standalone --nproc-per-node 2 launch/examples/train_and_generate.py

Every rank is a trainer's rank, which brings its own torch.distributed, and carries one rank of the
engine (tp = number of ranks). The trainer is evolution strategies with antithetic pairs (Salimans
et al., 2017): each round it nudges the model's last norm by noise, once up and once down, asks the
engine for answers, and moves towards what was rewarded. Nudges are a seed and a number, so
`collective_rpc` carries them; noise is drawn where it is needed.

The reward is a toy, to be watched: the share of the letter e in the answers.
"""

import argparse
import asyncio
import time

import torch
import torch.distributed as dist

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.worker.runner import Worker

PROMPTS = ["Once upon a time", "One day, a girl", "The dog was", "In the morning"]
NOISE = 0.05
STEP = 0.5


def nudge(worker: Worker, seed: int, scale: float) -> None:
    """Runs on every rank of the engine: moves the last norm's weights by `scale` × noise."""
    if (norm := worker.stage.model.norm) is not None:  # only the last stage has it
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(norm.weight.shape, generator=generator)
        norm.weight.add_(noise.to(norm.weight), alpha=scale)


async def reward(engine: AsyncEngine) -> float:
    """Leader: the share of e in the answers to all prompts."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(engine.generate(p, params).collect()) for p in PROMPTS]
    text = "".join(update.text for answer in asked for update in answer.result())
    return text.count("e") / len(text)


async def evaluate(engine: AsyncEngine, seed: int) -> tuple[float, float]:
    """One phase: the rewards of both directions, on every rank."""
    rewards = torch.zeros(2)
    async with engine.active():
        if engine.is_leader:
            for direction, scale in enumerate((NOISE, -2 * NOISE)):
                await engine.collective_rpc(nudge, (seed, scale))
                await engine.reset_prefix_cache()  # what it holds was computed with other weights
                rewards[direction] = await reward(engine)
            await engine.collective_rpc(nudge, (seed, NOISE))  # back in the middle
    # The engine rests: the trainer may use its process group, and block this thread.
    dist.broadcast(rewards, src=0)
    return rewards[0].item(), rewards[1].item()


async def train(model: str | None, rounds: int, pause_s: float) -> None:
    config = EngineConfig(model=model, tensor_parallel_size=dist.get_world_size())
    async with AsyncEngine(config) as engine:
        for seed in range(rounds):
            up, down = await evaluate(engine, seed)
            time.sleep(pause_s)  # noqa: ASYNC251  # stands for a trainer that computes
            if engine.is_leader:
                await engine.collective_rpc(nudge, (seed, STEP * (up - down)))
                print(f"round {seed}: reward {up:.4f} one way, {down:.4f} the other", flush=True)
    dist.barrier()  # the engine is gone, the process group is not
    print(f"rank {dist.get_rank()}: done, the trainer goes on", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for aioengine serve; default: SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two phases")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    asyncio.run(train(arguments.model, arguments.rounds, arguments.pause))
    dist.destroy_process_group()
