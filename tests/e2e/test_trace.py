"""`aioengine trace` against a launch of which one rank is blocked; a stuck device thread."""

import json
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import blocking_rank
from support.launching import STORIES, Launch, post, rank_command

from aioengine.cli.main import main

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

KEY = "sesame"
HEARTBEAT_S = 8.0
COMMAND = [*rank_command(2)[:-2], str(Path(blocking_rank.__file__))]


def trace(capsys: pytest.CaptureFixture[str], what: str, endpoint: Path, *flags: str) -> str:
    """What the command prints. In this process: a rank that is blocked for long is declared lost,
    and starting a process takes seconds where cores are few."""
    capsys.readouterr()
    assert main(["trace", what, "--endpoint-file", str(endpoint), *flags]) == 0
    return capsys.readouterr().out


async def call(url: str, method: str, *args: Any) -> None:
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as session:
        await post(session, "/collective_rpc", {"method": method, "args": args, "timeout": 30})


async def test_a_blocked_loop_and_a_stuck_device_thread_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOENGINE_ADMIN_API_KEY", KEY)
    endpoint, released = tmp_path / "endpoint", tmp_path / "released"
    with Launch(
        *("--model", str(STORIES), "-tp", "2", "--admin-api-key", KEY),
        *("--heartbeat-seconds", f"{HEARTBEAT_S:g}", "--endpoint-file", str(endpoint)),
        command=COMMAND,
    ) as launch:
        url = launch.wait_ready()
        state = json.loads(trace(capsys, "state", endpoint, "--json"))
        assert [rank["doing"] for rank in state["ranks"]] == ["idle", "idle"]
        assert state["ranks"][0]["last_operation"] == "all_gather of tp:0 [ranks 0, 1]"
        assert re.search(
            r"^1 \(dp0 pp0 tp1\) .* idle for", trace(capsys, "state", endpoint), re.MULTILINE
        )

        await call(url, "block_loop", 1, str(released))
        launch.wait_line(r"WARNING \[rank 1 .*the event loop has not run for")
        rank1 = trace(capsys, "stacks", endpoint).partition("=== rank 1 ")[2]
        released.touch()
        now, then = rank1.split("the event loop has been blocked for")
        assert "in wait_for_file" in now
        assert "--- thread device" in now
        assert "in wait_for_file" in then

        await call(url, "hang_when_idle", 1)
        begun = time.monotonic()
        launch.wait_line(r"first failure: rank 1 \(dp0 pp0 tp1\) .* its device thread has nothing")
        assert time.monotonic() - begun < HEARTBEAT_S + 2
        assert launch.wait_end() != 0
        assert "in take_arrived_or_hang" in launch.log  # the stacks of rank 1
        assert launch.log.count("first failure: rank 1 ") == 2
        assert not launch.pids_left()
