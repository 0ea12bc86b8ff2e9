"""`aioengine doctor` in place of a launch: all is well; a rank is missing and one there twice."""

import json
import socket
import sys
from contextlib import ExitStack
from typing import Any

from support.launching import Launch

RANK = [sys.executable, "-m", "aioengine.cli", "doctor"]
LIMIT_S = 5
END_S = 60.0


def report_in(launch: Launch) -> dict[str, Any]:
    """The one line of JSON among what the processes wrote."""
    (line,) = [line for line in launch.log.splitlines() if line.startswith("{")]
    report: dict[str, Any] = json.loads(line)
    return report


def test_four_ranks_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    flags = ["-tp", "2", "-pp", "2", "--json", "--model", "not-there", "--no-async-scheduling"]
    command = [*torchrun, "--nproc-per-node", "4", "-m", *RANK[2:], *flags]
    with Launch(command=command) as launch:
        assert launch.wait_end(END_S) == 0
        report = report_in(launch)
        assert launch.pids_left() == []
    assert report["exit_status"] == 0
    assert not [f for f in report["findings"] if f["severity"] == "fault"]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    assert {rank["host"] for rank in report["ranks"]} == {socket.gethostname()}
    assert len({rank["pid"] for rank in report["ranks"]}) == 4
    for rank in report["ranks"]:
        assert rank["device"]["matmul_ms"] > 0
        assert rank["launcher"] == "torchrun"
        assert rank["interface"] == "lo"
        assert abs(rank["clock"]["offset_ms"]) <= rank["clock"]["error_ms"] + 0.01
    ways = {(cell["source"], cell["target"]) for cell in report["tcp"]["cells"]}
    assert ways == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert all(cell["round_trip_us"] > 0 for cell in report["tcp"]["cells"])
    timed = {(t["group"].partition(":")[0], tuple(t["ranks"])) for t in report["timings"]}
    assert timed == {("tp", (0, 1)), ("tp", (2, 3)), ("pp", (0, 2)), ("pp", (1, 3))} | {
        ("feedback", (0, 1, 2))
    }
    backends = {t["backend"] for t in report["timings"] if t["group"].startswith("tp")}
    assert backends == {"shm", "gloo"}
    assert {t["operation"] for t in report["timings"]} == {"all_reduce", "send"}
    assert all(t["latency_us"] > 0 and t["gb_per_s"] > 0 for t in report["timings"])


def test_one_rank_missing_and_one_there_twice() -> None:
    """Started by variables alone: ranks 0, 1 and 2 of 4, and 2 once more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ExitStack() as stack:
        launches = []
        for rank in (0, 1, 2, 2):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            flags = ["-tp", "2", "-pp", "2", "--json", "--startup-timeout-seconds", str(LIMIT_S)]
            launches.append(stack.enter_context(Launch(command=[*RANK, *flags], env=variables)))
        assert [launch.wait_end(END_S) for launch in launches] == [1, 1, 1, 1]
        report = report_in(launches[0])
        pids = {launch.process.pid for launch in launches[2:]}
        assert all(not launch.log for launch in launches[1:])
    assert report["status"] == "fault"
    assert report["missing"] == [3]
    assert LIMIT_S <= report["seconds"] < LIMIT_S + 10
    faults = {f["kind"]: f for f in report["findings"] if f["severity"] == "fault"}
    assert set(faults) == {"missing", "twice"}
    assert "rank 3 (dp0 pp1 tp1) of 4 missing" in faults["missing"]["text"]
    assert socket.gethostname() in faults["missing"]["text"]
    assert faults["twice"]["ranks"] == [2]
    assert faults["twice"]["hosts"] == [socket.gethostname()]
    assert all(f"pid {pid}" in faults["twice"]["text"] for pid in pids)
    assert len(report["tcp"]["cells"]) == 6
    assert report["unmeasured"] == ["ranks 0 to 3: rank 3 is not here"]
