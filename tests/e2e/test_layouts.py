"""Golden rows on every layout, also those in which nothing divides; uneven loads over replicas."""

import asyncio

import aiohttp
import pytest
from support.golden_rows import check_rows
from support.launching import SHARED, STORIES, Launch, golden, post

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values")

STORIES_LAYOUTS = {
    "tp3": (3, ("-tp", "3")),
    "tp4": (4, ("-tp", "4")),
    "tp5": (5, ("-tp", "5")),
    "pp3": (3, ("-pp", "3")),
    "pp5": (5, ("-pp", "5")),
    "pp2-by-hand": (2, ("-pp", "2", "--pipeline-layers", "1,4")),
    "dp3": (3, ()),
    "tp2-dp2": (4, ("-tp", "2")),
    "pp2-dp2": (4, ("-pp", "2")),
    "tp3-pp2": (6, ("-tp", "3", "-pp", "2")),
    "tp2-pp2-dp2": (8, ("-tp", "2", "-pp", "2")),
}
SMOLLM2_LAYOUTS = {
    "tp3": (3, ("-tp", "3")),
    "tp4": (4, ("-tp", "4")),
    "pp3": (3, ("-pp", "3")),
    "dp3": (3, ()),
    "tp2-dp2": (4, ("-tp", "2")),
    "pp2-dp2": (4, ("-pp", "2")),
}


FURTHER = {"tp4", "pp3", "tp2-dp2", "pp2-dp2"}
"""In which nothing meets that does not in another one, here or in test_golden.py."""


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.layouts if layout in FURTHER else ())
        for layout in STORIES_LAYOUTS
    ],
)
async def test_stories(layout: str) -> None:
    num_ranks, flags = STORIES_LAYOUTS[layout]
    with Launch("--model", str(STORIES), *flags, num_ranks=num_ranks) as launch:
        await check_rows(launch.wait_ready(), golden("stories260k_greedy"))


@pytest.mark.layouts
@pytest.mark.parametrize("layout", SMOLLM2_LAYOUTS)
async def test_smollm2(layout: str) -> None:
    """All layouts up to four processes; those of the first slice are in test_golden.py."""
    num_ranks, flags = SMOLLM2_LAYOUTS[layout]
    with Launch("--dtype", "float32", *flags, num_ranks=num_ranks) as launch:
        await check_rows(launch.wait_ready(), golden("smollm2_greedy"))


async def test_replicas_share_the_load() -> None:
    """Long and short requests at once: none waits for a replica while the other is idle."""
    with Launch("--model", str(STORIES), num_ranks=2) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            body = {"prompt": [1, 403, 407], "temperature": 0, "ignore_eos": True}
            async with asyncio.TaskGroup() as tasks:
                for max_tokens in (300, 10, 10, 300, 10, 10, 20, 20):
                    tasks.create_task(
                        post(session, "/v1/completions", {**body, "max_tokens": max_tokens})
                    )
            async with session.get("/metrics") as response:
                lines = (await response.text()).splitlines()
    generated = [float(line.split()[1]) for line in lines if "generation_tokens_total{" in line]
    assert sum(generated) == 680
    assert min(generated) > 0
