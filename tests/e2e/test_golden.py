"""Greedy decoding over HTTP equals the float32 references, on every layout."""

import aiohttp
import pytest
from support.golden_rows import check_rows, complete, first_difference
from support.launching import SHARED, STORIES, Launch, golden

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values")

LAYOUTS = {
    "one": (1, ()),
    "tp2": (2, ("-tp", "2")),
    "pp2": (2, ("-pp", "2")),
    "dp2": (2, ()),
    "tp2-pp2": (4, ("-tp", "2", "-pp", "2")),
}


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_stories(layout: str, scheduling: str) -> None:
    num_ranks, flags = LAYOUTS[layout]
    with Launch("--model", str(STORIES), *flags, scheduling, num_ranks=num_ranks) as launch:
        await check_rows(launch.wait_ready(), golden("stories260k_greedy"))


@pytest.mark.parametrize(
    "scheduling",
    ["--async-scheduling", pytest.param("--no-async-scheduling", marks=pytest.mark.layouts)],
)
@pytest.mark.parametrize(
    "layout",
    [
        "one",
        "dp2",
        "tp2-pp2",
        pytest.param("tp2", marks=pytest.mark.layouts),
        pytest.param("pp2", marks=pytest.mark.layouts),
    ],
)
async def test_smollm2(layout: str, scheduling: str) -> None:
    num_ranks, flags = LAYOUTS[layout]
    with Launch("--dtype", "float32", *flags, scheduling, num_ranks=num_ranks) as launch:
        await check_rows(launch.wait_ready(), golden("smollm2_greedy"))


@pytest.mark.parametrize("layout", ["one", "tp2"])
async def test_smollm2_bfloat16(layout: str) -> None:
    """Rounding may choose another token, but only one that the reference also held likely."""
    num_ranks, flags = LAYOUTS[layout]
    with Launch(*flags, num_ranks=num_ranks) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            for row in golden("smollm2_greedy"):
                choice = await complete(session, row)
                at = first_difference(choice["token_ids"], row["token_ids"])
                if at is not None:
                    top5 = [token_id for token_id, _ in row["top5"][at]]
                    assert choice["token_ids"][at] in top5
