"""Generate inside one's own ranks: the least that it takes.

torchrun --standalone --nproc-per-node 2 launch/examples/generate.py --tensor-parallel-size 2
"""

import argparse
import asyncio

from aioengine import AsyncEngine, EngineConfig, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "2, 3, 5, 7,"]


async def main(config: EngineConfig) -> None:
    async with AsyncEngine(config) as engine, engine.active():
        if engine.is_leader:  # the others compute until it leaves
            params = SamplingParams(temperature=0, max_tokens=24)
            async with asyncio.TaskGroup() as tasks:
                for prompt in PROMPTS:
                    tasks.create_task(show(engine, prompt, params))


async def show(engine: AsyncEngine, prompt: str, params: SamplingParams) -> None:
    text = ""
    async with engine.generate(prompt, params) as stream:
        async for update in stream:
            text += update.text
    print(f"{prompt!r} -> {text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for aioengine serve; default: SmolLM2-135M-Instruct")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    asyncio.run(main(EngineConfig(**vars(parser.parse_args()))))
