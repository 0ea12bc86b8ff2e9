"""The default model on CUDA: golden tokens, and how many a second. Ten minutes at most.

pytest -m gpu -s tests/gpu
"""

import asyncio
import time

import aiohttp
import pytest
import torch
from support.golden_rows import check_rows, complete, first_difference
from support.launching import SHARED, Launch, golden, post

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values"),
]

NUM_TOKENS = 200
LAYOUTS = {"one": (1, ()), "tp2": (2, ("-tp", "2")), "pp2": (2, ("-pp", "2"))}


def launched(layout: str, *flags: str) -> Launch:
    num_ranks, sizes = LAYOUTS[layout]
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    return Launch("--device", "cuda", *sizes, *flags, num_ranks=num_ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_float32(layout: str) -> None:
    with launched(layout, "--dtype", "float32") as launch:
        await check_rows(launch.wait_ready(), golden("smollm2_greedy"))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_bfloat16_and_speed(layout: str) -> None:
    """Where rounding chooses another token, the reference had it among its five most likely."""
    with launched(layout) as launch:
        url = launch.wait_ready()
        async with aiohttp.ClientSession(url) as session:
            for row in golden("smollm2_greedy"):
                choice = await complete(session, row)
                at = first_difference(choice["token_ids"], row["token_ids"])
                if at is not None:
                    top5 = [token_id for token_id, _ in row["top5"][at]]
                    assert choice["token_ids"][at] in top5
        for num_streams in (1, 8, 64):
            speed = await tokens_per_second(url, num_streams)
            print(f"\n{torch.cuda.get_device_name()} {layout}: {num_streams} streams {speed:.0f}/s")


async def tokens_per_second(url: str, num_streams: int) -> float:
    """Decoded tokens of all streams together; the first prompt's prefill counts, too."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_streams):
                body = {
                    "prompt": f"Story number {number}: once upon a time",
                    "max_tokens": NUM_TOKENS,
                    "ignore_eos": True,
                    "temperature": 0,
                }
                tasks.create_task(post(session, "/v1/completions", body))
        return num_streams * NUM_TOKENS / (time.monotonic() - started)
