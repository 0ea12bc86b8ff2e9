"""`--api-ranks leaders`: every leader serves HTTP and reaches every replica."""

import aiohttp
import pytest
from support.launching import STORIES, Launch, golden, post

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")


async def test_every_leader_serves_every_replica() -> None:
    row = golden("stories260k_greedy")[0]
    body = {
        "prompt": row["prompt_ids"],
        "max_tokens": len(row["token_ids"]),
        "temperature": 0,
        "return_token_ids": True,
    }
    with Launch("--model", str(STORIES), "--api-ranks", "leaders", num_ranks=2) as launch:
        urls = [launch.wait_line(rf"\[rank {rank} .*ready: .* at (\S+)")[1] for rank in (0, 1)]
        assert urls[0] != urls[1]
        for url in urls:
            async with aiohttp.ClientSession(url) as session:
                for replica in ("0", "1"):
                    session.headers["X-data-parallel-rank"] = replica
                    answer = await post(session, "/v1/completions", body)
                    assert answer["choices"][0]["token_ids"] == row["token_ids"]
                async with session.get("/server_info") as info:
                    states = [replica["state"] for replica in (await info.json())["replicas"]]
                assert states == ["ready", "ready"]
        launch.terminate()
        launch.wait_end()
        assert launch.log.count("ended in order") == 2
        assert not launch.pids_left()
