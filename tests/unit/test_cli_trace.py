"""What `aioengine trace` prints, and how it complains."""

import argparse
import http.server
import io
import socket
import threading
from typing import Any

import pytest

from aioengine.cli import trace_server
from aioengine.cli.main import main
from aioengine.cli.trace_server import fetch
from aioengine.cli.trace_stacks import print_stacks
from aioengine.cli.trace_state import print_state

WHO = {"rank": 1, "coords": "dp0 pp0 tp1", "host": "h", "pid": 17, "replica": "ready"}
DOING = {
    "last_step": 812,
    "doing": "step 813",
    "operation": "all_reduce of tp:0 [ranks 0, 1]",
    "doing_seconds": 2.25,
}
STATE = {
    **WHO,
    **DOING,
    "error": None,
    "last_operation": "recv from rank 0 on pp:0",
    "num_queued": 2,
    "num_requests_running": 5,
    "num_requests_waiting": 6,
    "loop_lag_seconds": 0.002,
    "max_loop_lag_seconds": 3.25,
    "rss_bytes": 7 * 2**20,
    "num_fds": 8,
    "num_threads": 9,
    "uptime_seconds": 10.0,
}
SILENT = {**WHO, "error": "no answer within 3 s"}


def state_of(*ranks: dict[str, Any]) -> str:
    out = io.StringIO()
    print_state({"status": "ok", "ranks": ranks}, out)
    return out.getvalue()


def stacks_of(*ranks: dict[str, Any]) -> str:
    out = io.StringIO()
    print_stacks({"status": "ok", "ranks": ranks}, out)
    return out.getvalue()


def test_a_row_for_every_rank() -> None:
    row = state_of(STATE).splitlines()[-1].split("  ")
    assert [cell.strip() for cell in row if cell.strip()] == [
        "1 (dp0 pp0 tp1)",
        "h 17",
        "ready",
        "812",
        "step 813, all_reduce of tp:0 [ranks 0, 1] for 2.2 s",
        "2",
        "5/6",
        "recv from rank 0 on pp:0",
        "2.0 ms, max 3250",
        "7 MiB",
        "8",
        "10 s",
    ]


def test_ranks_that_do_not_answer_follow_with_their_last_heartbeat() -> None:
    last = {"seconds_ago": 1.5, **DOING}
    text = state_of({**SILENT, "last_heartbeat": last}, {**SILENT, "last_heartbeat": None})
    who = "rank 1 (dp0 pp0 tp1) host h pid 17: no answer within 3 s; "
    assert text.splitlines() == [
        "status: ok",
        f"{who}its last heartbeat, 1.5 s ago: in step 813, all_reduce of tp:0 [ranks 0, 1] for "
        "2.2 s, job 812 done",
        f"{who}no heartbeat was heard",
    ]


def test_stacks_of_now_and_of_the_block() -> None:
    line = '  File "x.py", line 3, in f\n    [bold]g()\n'
    threads = [{"thread": "MainThread", "stack": line}]
    block = {"is_over": True, "lasted_seconds": 3.2, "ended_seconds_ago": 14.0, "threads": threads}
    blocked = {**WHO, "error": None, "threads": threads, "loop_block": block}
    assert stacks_of(blocked, SILENT).splitlines() == [
        "=== rank 1 (dp0 pp0 tp1) host h pid 17",
        "--- thread MainThread",
        '  File "x.py", line 3, in f',
        "    [bold]g()",
        "the event loop was blocked for 3.2 s, until 14 s ago; where it was then:",
        "--- then: thread MainThread",
        '  File "x.py", line 3, in f',
        "    [bold]g()",
        "=== rank 1 (dp0 pp0 tp1) host h pid 17",
        "no answer within 3 s",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--url", "localhost"], "--url must begin with http:// or https://, found 'localhost'"),
        (["--endpoint-file", "/nowhere/at/all"], "--endpoint-file /nowhere/at/all: No such file"),
        (["--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1: "),
    ],
)
@pytest.mark.parametrize("what", ["state", "stacks"])
def test_errors_say_what_was_wrong(
    what: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", what, "--admin-api-key", "k", *argv]) == 1
    assert f"aioengine trace {what}: error: {message}" in capsys.readouterr().err


def test_a_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOENGINE_ADMIN_API_KEY", raising=False)
    with pytest.raises(ValueError, match="--admin-api-key, or AIOENGINE_ADMIN_API_KEY"):
        fetch(argparse.Namespace(), "/trace/state")


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(403)
        self.end_headers()
        if self.path == "/trace/state":
            self.wfile.write(b'{"error": {"message": "needs --admin-api-key"}}')

    def log_message(self, *args: object) -> None: ...


def test_what_the_server_says_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for what in ("state", "stacks"):
            assert main(["trace", what, "--admin-api-key", "k", "--url", url]) == 1
        server.shutdown()
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"aioengine trace state: error: {url} answers 403: needs --admin-api-key"
    assert second == f"aioengine trace stacks: error: {url} answers 403: Forbidden"


def test_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace_server, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["trace", "state", "--admin-api-key", "k", "--url", url]) == 1
    assert f"{url} does not answer within 0.2 s: the event loop" in capsys.readouterr().err
