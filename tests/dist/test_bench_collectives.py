"""`aioengine bench collectives`, as a person types it."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from aioengine.bench.collectives import Plan, Row, print_json, print_table
from aioengine.cli.main import main

COMMAND = ["bench", "collectives"]


def bench(launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, "-m", "aioengine.cli", *COMMAND, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_starts_ranks_and_compares_backends() -> None:
    done = bench([sys.executable], "--sizes", "1K,64K", "--dtypes", "float32", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["operation"], found["num_ranks"]) == ("all_reduce", 2)
    assert [(row["num_bytes"], row["dtype"]) for row in found["rows"]] == [
        (1024, "float32"),
        (65536, "float32"),
    ]
    for row in found["rows"]:
        medians = row["medians_us"]
        assert list(medians) == ["shm", "gloo"]
        assert row["ratio"] == medians["gloo"] / medians["shm"]
    assert found["rows"][0]["ratio"] > 1


def test_under_a_launcher_it_is_a_rank() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--operation", "reduce_scatter", "--sizes", "4K", "--dtypes", "bfloat16"]
    done = bench([*torchrun, "--nproc-per-node", "3"], *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reduce_scatter, 3 ranks, medians in µs\n")
    for text in ("4 KiB", "bfloat16", "gloo / shm"):
        assert done.stdout.count(text) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "12"], "--sizes takes multiples of 8 such as 4096, 16K or 1M, found '12'"),
        (["--sizes", "1K,x"], "found 'x'"),
        (["--dtypes", "float32,int7"], "--dtypes takes float32, bfloat16"),
        (["--ranks", "1"], "--ranks must be 2 or more, found 1"),
    ],
)
def test_a_wrong_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_one_backend_is_shown_without_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    """As where the ranks are on two nodes."""
    plan, rows = Plan("all_reduce", (1024,), (torch.float32,)), [Row(1024, "float32", {"gloo": 2.5})]
    print_table(plan, 2, rows)
    assert "2.5" in (shown := capsys.readouterr().out)
    assert "/" not in shown
    print_json(plan, 2, rows)
    assert json.loads(capsys.readouterr().out)["rows"][0]["ratio"] == 1


def test_ctrl_c_is_no_success() -> None:
    """Nor does it leave ranks behind, which end with the command whatever becomes of it."""
    command = [sys.executable, "-m", "aioengine.cli", *COMMAND, "--sizes", ",".join(["16M"] * 40)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as bench:
        assert bench.stderr is not None
        for line in bench.stderr:
            if "Using ['gloo'] all-reduce" in line and "library" in line:
                break
        os.killpg(bench.pid, signal.SIGINT)
        rest = bench.stderr.read()
        assert bench.wait(30) == 130, rest
    assert "Traceback" not in rest
    assert "SIGINT" in rest
