"""`aioengine bench serve`, `throughput` and `roofline` on a real engine, as a person types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import STORIES, Launch

from aioengine.bench.offline import engine_config
from aioengine.bench.roofline import configure, measure_engine, read_model
from aioengine.bench.roofline_machine import measure_machine
from aioengine.bench.roofline_report import Report, print_report, to_json
from aioengine.bench.roofline_work import judge
from aioengine.cli.main import main
from aioengine.flags import CommandParser

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs shared/models")
FEW = ("--kv-cache-memory-bytes", str(2**23), str(STORIES))


def bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "aioengine.cli", "bench", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_serve(tmp_path: Path) -> None:
    lengths = ["--input-len", "20-40", "--output-len", "8-16", "--num-requests", "6"]
    with Launch("--model", str(STORIES), "--cpu-threads", "1") as launch:
        url = launch.wait_ready()
        path = tmp_path / "found.json"
        done = bench("serve", "--url", url, *lengths, "--concurrency", "3", "--json", str(path))
        assert done.returncode == 0, done.stderr
        assert "6 of 6 requests" in done.stdout
        found = json.loads(path.read_text())
        (served,) = found["servers"]
        assert served["model"] == "stories260k"
        summary = served["summary"]
        assert (summary["num_short"], summary["failures"], summary["is_exact"]) == (0, {}, True)
        assert set(summary["latencies"]) == {"ttft", "itl", "tpot", "e2e"}
        vs = ["--vs", url, "--rounds", "2", "--concurrency", "2", "--chat", "--no-stream"]
        done = bench("serve", "--url", url, *vs, "--output-len", "4", "--num-requests", "2")
        assert done.returncode == 0, done.stderr
        assert "first / second" in done.stdout
        done = bench("serve", "--url", url, "--input-len", "600")
        assert done.returncode == 1
        assert "HTTP 400: the prompt is too long: prompt has 600 tokens" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("launcher", ["itself", "torchrun"])
def test_throughput(launcher: str) -> None:
    line = ["--num-prompts", "6", "--input-len", "20", "--output-len", "5", "--json", *FEW]
    if launcher == "itself":
        done = bench("throughput", "-tp", "2", *line)
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        done = bench("throughput", "-pp", "2", *line, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["num_input_tokens"], found["num_output_tokens"]) == (120, 30)
    assert found["total_tokens_per_s"] == pytest.approx(150 / found["wall_s"])
    assert found["steps"]["decode"]["count"] >= 4
    assert found["steps"]["decode"]["median_ms"] > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["throughput", "--num-prompts", "0"], "--num-prompts must be 1 or more, found 0"),
        (["throughput", "--model", "a", "b"], "--model a and MODEL b are both given"),
        (["throughput", "-dp", "2"], "this measures one replica, of tp × pp = 1 ranks"),
        (["throughput", "/nowhere"], "'/nowhere' is neither a directory"),
        (["throughput", "--input-len", "512", *FEW], "come to 640 tokens, the context is 512"),
        (["roofline", "/nowhere"], "'/nowhere' is neither a directory"),
        (["roofline", "--quantization", "int3", *FEW], "--quantization"),
    ],
)
def test_a_wrong_line_is_refused(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *line]) == 1
    assert message in capsys.readouterr().err


async def test_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    """Its parts, with less of the machine measured than the command does."""
    parser = CommandParser()
    configure(parser)
    config = engine_config(parser.parse_args([*FEW, "--cpu-threads", "1"]))
    model = read_model(config)
    machine = measure_machine(model.cfg, [model.read_bytes], 1, ["float32"], [1, 32])
    phases = await measure_engine(config, model)
    shares = tuple(judge(model, phase, machine.limits(model, 1)) for phase in phases)
    assert [s.name for s in shares] == [
        "decode, 1 stream",
        "decode, 32 streams",
        "prefill, 511 tokens",
    ]
    for share in shares:
        assert 0 < share.of_memory < 1
        assert 0 < share.of_matmul < 1
    report = Report(model.cfg.name, model.dtype, 1, model.read_bytes, machine, shares)
    print_report(report)
    assert "decode of 1 stream at" in capsys.readouterr().out
    found = json.loads(to_json(report))
    assert (found["model"], len(found["shares"])) == ("stories260k", 3)
