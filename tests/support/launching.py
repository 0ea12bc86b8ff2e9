"""Real launches for tests: torchrun (or plain) processes, their log, their end, nothing left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

SHARED = Path(__file__).parents[2].parent / "shared"
STORIES = SHARED / "models" / "stories260k"
MARKER = "AIOENGINE_TEST_LAUNCH"
READY_S = 240.0
END_S = 60.0


class Launch:
    """One launch of `num_ranks` ranks, ended on exit from the context whatever happened.

    Waiting is done on lines of the log, as a person would.
    """

    def __init__(
        self,
        *flags: str,
        num_ranks: int = 1,
        command: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self._id = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._is_closed = False
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "SPT_NOENV": "1",  # else setproctitle overwrites what `pids_left` looks for
            MARKER: self._id,
            **(env or {}),
        }
        self.process = subprocess.Popen(
            [*(command or rank_command(num_ranks)), "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Launch":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        for pid in self.pids_left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if exc is not None:
            sys.stderr.write(self.log)

    @property
    def log(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def wait_ready(self, times: int = 1) -> str:
        """The URL, once the launch serves (for that many times, with restarts)."""
        return self.wait_line(r"ready: .* at (\S+)", READY_S, times)[1]

    def wait_line(self, pattern: str, timeout_s: float = END_S, times: int = 1) -> re.Match[str]:
        """The line that is the `times`th to match; fails when the launch ends without it."""
        compiled = re.compile(pattern)
        deadline = time.monotonic() + timeout_s
        seen, left_to_match = 0, times
        with self._changed:
            while True:
                for line in self._lines[seen:]:
                    if match := compiled.search(line):
                        left_to_match -= 1
                        if not left_to_match:
                            return match
                seen = len(self._lines)
                left = deadline - time.monotonic()
                assert not self._is_closed, f"the launch ended without {pattern!r}"
                assert left > 0, f"no line {pattern!r} within {timeout_s} s"
                self._changed.wait(left)

    def terminate(self) -> None:
        """SIGTERM to the launcher, as a cluster does."""
        self.process.send_signal(signal.SIGTERM)

    def wait_end(self, timeout_s: float = END_S) -> int:
        """The launcher's exit status, once it and its log have ended."""
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def pids_left(self) -> list[int]:
        """Processes of this launch that are alive."""
        needle = f"{MARKER}={self._id}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    is_ours = needle in (entry / "environ").read_bytes()
                    is_alive = "State:\tZ" not in (entry / "status").read_text()
                except OSError:
                    continue
                if is_ours and is_alive:
                    found.append(int(entry.name))
        return found

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def rank_command(num_ranks: int) -> list[str]:
    """The line a person types for this many ranks."""
    module = ["-m", "aioengine.launch"]
    if num_ranks == 1:
        return [sys.executable, *module]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(num_ranks), *module]


def free_port() -> int:
    """For what cannot choose a port by itself: one that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def golden(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((SHARED / "golden" / f"{name}.json").read_text())
    return rows


# --- a small client ----------------------------------------------------------------------------


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A response that must be a 200."""
    async with session.post(path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def rank_pids(session: aiohttp.ClientSession) -> dict[int, int]:
    """The process of every rank that serves."""
    async with session.get("/server_info") as response:
        replicas = (await response.json())["replicas"]
    return {rank["rank"]: rank["pid"] for replica in replicas for rank in replica["ranks"]}


async def stream(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """All events of a stream that must end with [DONE]."""
    events = []
    async with session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                if line.strip() == b"data: [DONE]":
                    return events
                events.append(json.loads(line[6:]))
    raise AssertionError(f"the stream ended without [DONE] after {events[-1:]}")


async def wait_metrics(session: aiohttp.ClientSession, **wanted: float) -> dict[str, float]:
    """Scrape until these figures (summed over engines) are what is wanted.

    A scrape is a round trip to the server, which publishes changes by itself; no pause is needed.
    """
    deadline = time.monotonic() + END_S
    while True:
        figures = await scrape(session)
        if all(figures[f"aioengine:{name}"] == value for name, value in wanted.items()):
            return figures
        assert time.monotonic() < deadline, f"{wanted} never came, last {figures}"


async def scrape(session: aiohttp.ClientSession) -> dict[str, float]:
    """Every sample of /metrics without labels but `engine`, summed over engines."""
    async with session.get("/metrics") as response:
        text = await response.text()
    figures: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r'([\w:]+)\{engine="\d+"(?:,[^}]*)?\} (\S+)', line):
            figures[match[1]] = figures.get(match[1], 0.0) + float(match[2])
    return figures
