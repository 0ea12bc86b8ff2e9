"""A hub id from a cache, as the ranks of a launch find it: nothing has imported the library yet."""

from pathlib import Path

import aiohttp
import pytest
from support.golden_rows import check_rows
from support.launching import STORIES, Launch, golden

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """The environment of a launch with org/stories in its cache."""
    repo = tmp_path / "hub" / "models--org--stories"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / COMMIT).symlink_to(STORIES)
    return {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}


async def test_served_under_its_id(offline: dict[str, str]) -> None:
    model = ("--model", "org/stories", "--tokenizer", "org/stories@main")
    with Launch(*model, "-tp", "2", num_ranks=2, env=offline) as launch:
        url = launch.wait_ready()
        await check_rows(url, golden("stories260k_greedy"))
        async with aiohttp.ClientSession(url) as session, session.get("/v1/models") as models:
            assert (await models.json())["data"][0]["id"] == "org/stories"


def test_not_in_the_cache(offline: dict[str, str]) -> None:
    with Launch("--model", "org/other", env=offline) as launch:
        assert launch.wait_end() == 1
        assert "aioengine: error: --model: 'org/other' is neither" in launch.log
        assert "HF_HUB_OFFLINE is set, the cache is" in launch.log
        assert "Traceback" not in launch.log
