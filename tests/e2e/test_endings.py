"""How a launch ends: drained, killed, started again, started twice."""

import asyncio
import os
import signal
import sys

import aiohttp
import pytest
from support.launching import STORIES, Launch, post, stream

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

MODEL = ("--model", str(STORIES))
PROMPT = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
LONG = {**PROMPT, "max_tokens": 450}
SERVE = [sys.executable, "-m", "aioengine.cli", "serve"]


@pytest.mark.parametrize(
    ("num_ranks", "flags", "max_tokens"),
    [(1, (), 450), (4, ("-tp", "2", "-pp", "2"), 60), (2, (), 450)],
    ids=["one", "tp2-pp2", "dp2"],
)
async def test_sigterm_drains(num_ranks: int, flags: tuple[str, ...], max_tokens: int) -> None:
    """The stream in flight ends well, new requests are refused, every rank ends with status 0."""
    with Launch(*MODEL, *flags, num_ranks=num_ranks) as launch:
        async with (
            aiohttp.ClientSession(launch.wait_ready()) as session,
            session.post(
                "/v1/completions", json={**PROMPT, "max_tokens": max_tokens, "n": 2, "stream": True}
            ) as response,
        ):
            await response.content.readline()
            launch.terminate()
            await asyncio.to_thread(launch.wait_line, "draining")  # noqa: TID251
            async with session.post("/v1/completions", json=PROMPT) as refused:
                assert refused.status == 503
                assert refused.headers["Retry-After"]
            async with session.get("/health") as health:
                assert (health.status, (await health.json())["status"]) == (200, "draining")
            async with session.get("/readyz") as ready:
                assert ready.status == 503
            text = (await response.read()).decode()
        assert text.count('"finish_reason":"length"') == 2
        assert text.endswith("data: [DONE]\n\n")
        status = launch.wait_end()
        assert status == (0 if num_ranks == 1 else 1)  # torchrun exits 1 on any signal
        assert launch.log.count("ended in order") == num_ranks
        assert not launch.pids_left()


async def test_serve_exits_0_on_sigterm() -> None:
    with Launch(*MODEL, "-tp", "2", command=SERVE) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            await post(session, "/v1/completions", PROMPT)
        launch.terminate()
        assert launch.wait_end() == 0
        assert not launch.pids_left()


@pytest.mark.parametrize("victim", range(4))
async def test_killed_rank_ends_all(victim: int) -> None:
    """The client gets an error event, the log blames the right rank, nothing is left."""
    with Launch(*MODEL, "-tp", "2", "-pp", "2", num_ranks=4) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            async with session.get("/server_info") as info:
                ranks = (await info.json())["replicas"][0]["ranks"]
            async with session.post("/v1/completions", json={**LONG, "stream": True}) as response:
                await response.content.readline()
                os.kill(ranks[victim]["pid"], signal.SIGKILL)
                if victim == 0:
                    with pytest.raises(aiohttp.ClientError):  # it carried the front end
                        await response.read()
                else:
                    text = (await response.read()).decode()
                    assert f"rank {victim} (" in text.split("data: ")[-2]
                    assert text.endswith("data: [DONE]\n\n")
        assert launch.wait_end() != 0
        lines = [line for line in launch.log.splitlines() if "first failure: " in line]
        assert len(lines) == 3
        assert all(f"first failure: rank {victim} (" in line for line in lines)
        assert not launch.pids_left()


async def test_again_after_kill_and_two_at_once() -> None:
    flags = (*MODEL, "-pp", "2")
    with Launch(*flags, num_ranks=2) as first:
        first.wait_ready()
        for pid in first.pids_left():
            os.kill(pid, signal.SIGKILL)
        with Launch(*flags, num_ranks=2) as second, Launch(*flags, num_ranks=2) as third:
            for launch in (second, third):
                async with aiohttp.ClientSession(launch.wait_ready()) as session:
                    events = await stream(session, "/v1/completions", PROMPT)
                    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("num_ranks", "flags", "message"),
    [
        (1, ("-tp", "2"), "tp 2 × pp 1 = 2 processes does not divide the 1"),
        (1, ("--model", "/nowhere"), "--model: '/nowhere' is neither"),
        (1, ("--max-model-len", "100000"), "--max-model-len 100000"),
        (1, ("-pcp", "2"), "--prefill-context-parallel-size above 1 does not run yet"),
        (1, ("--quantization", "int8"), "--quantization does not run yet"),
        (2, ("-pp", "2", "--pipeline-layers", "1,1"), "--pipeline-layers"),
        (2, ("-tp", "2", "--distributed-executor-backend", "a:B"), "a:B: cannot import a"),
    ],
)
def test_what_cannot_start_says_why(num_ranks: int, flags: tuple[str, ...], message: str) -> None:
    with Launch(*MODEL, *flags, num_ranks=num_ranks) as launch:
        assert launch.wait_end() == 1
        assert message in launch.log
        assert not launch.pids_left()
