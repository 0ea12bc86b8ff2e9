"""How a launch ends: drained, killed, started again, started twice."""

import asyncio
import os
import re
import signal
import sys

import aiohttp
import pytest
from support.launching import STORIES, Launch, post, rank_pids, stream

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


@pytest.mark.parametrize(("flags", "num_signals"), [((), 2), (("--shutdown-timeout", "0"), 1)])
async def test_nobody_waits_for_streams(flags: tuple[str, ...], num_signals: int) -> None:
    """After a second signal, or with no time to drain in: an error event, at once."""
    with Launch(*MODEL, *flags) as launch:
        async with (
            aiohttp.ClientSession(launch.wait_ready()) as session,
            session.post("/v1/completions", json={**LONG, "n": 4, "stream": True}) as response,
        ):
            await response.content.readline()
            for time in range(num_signals):
                launch.terminate()
                launch.wait_line("SIGTERM", times=time + 1)
            text = (await response.read()).decode()
        assert "the server is shutting down" in text.split("data: ")[-2]
        assert text.endswith("data: [DONE]\n\n")
        assert launch.wait_end() == 0


@pytest.mark.parametrize(
    "command",
    [None, pytest.param([*SERVE, "-tp", "2"], marks=pytest.mark.layouts)],
    ids=["torchrun", "serve"],
)
@pytest.mark.parametrize(
    "stage", ["ready: ", pytest.param("assigned as", marks=pytest.mark.layouts)]
)
def test_ranks_end_with_their_launcher(command: list[str] | None, stage: str) -> None:
    with Launch(*MODEL, num_ranks=2, command=command) as launch:
        launch.wait_line(stage)
        launch.process.kill()
        launch.wait_end()  # the log ends when the last rank has
        assert launch.log.count("is gone; this rank ends within seconds") == 2
        assert not launch.pids_left()


def test_ranks_whose_launcher_died_before_they_looked() -> None:
    """They have only just been started: nothing of theirs is in the log, nor will much be."""
    with Launch(*MODEL, "-tp", "2", num_ranks=2) as launch:
        while len(launch.pids_left()) < 3:
            assert launch.process.poll() is None
        launch.process.kill()
        launch.wait_end()
        assert "HTTP at" not in launch.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_start_up(number: signal.Signals) -> None:
    with Launch(*MODEL, "-tp", "2", command=SERVE) as launch:
        launch.wait_line("assigned as", times=2)
        launch.process.send_signal(number)
        assert launch.wait_end() == 0
        assert launch.log.count("stopped during start-up") == 2
        assert not launch.pids_left()


@pytest.mark.parametrize("victim", range(4))
async def test_killed_rank_ends_all(victim: int) -> None:
    """The client gets an error event, the log blames the right rank, nothing is left."""
    with Launch(*MODEL, "-tp", "2", "-pp", "2", num_ranks=4) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            pids = await rank_pids(session)
            async with session.post("/v1/completions", json={**LONG, "stream": True}) as response:
                await response.content.readline()
                os.kill(pids[victim], signal.SIGKILL)
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
        blamed = re.search(r"Root Cause.*?rank +: (\d+) .*?exitcode +: (-?\d+) ", launch.log, re.S)
        assert blamed is not None
        assert blamed.groups() == (str(victim), str(-signal.SIGKILL))
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
        (1, ("--quantization", "int3"), "--quantization"),
        (
            1,
            ("--quantization", "int8", "--device", "cuda"),
            "--quantization int8 with --device cuda does not run yet",
        ),
        (2, ("-pp", "2", "--pipeline-layers", "1,1"), "--pipeline-layers"),
        (2, ("-tp", "2", "--distributed-executor-backend", "a:B"), "a:B: cannot import a"),
    ],
)
def test_what_cannot_start_says_why(num_ranks: int, flags: tuple[str, ...], message: str) -> None:
    with Launch(*MODEL, *flags, num_ranks=num_ranks) as launch:
        assert launch.wait_end() == 1
        assert message in launch.log
        assert not launch.pids_left()
