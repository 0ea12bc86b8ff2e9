"""`aioengine bench steps` and `aioengine trace steps`, as a person types them."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from support.chrome_traces import check_trace, spans_named
from support.launching import STORIES, Launch, post, rank_command

from aioengine.bench.steps import configure, measure, read_plan
from aioengine.bench.steps_report import print_tables
from aioengine.cli.main import main
from aioengine.flags import CommandParser

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

KEY = "sesame"
FEW = ("--kv-cache-memory-bytes", str(2**23), "--cpu-threads", "1", str(STORIES))


async def test_a_breakdown_and_the_cost_of_growth(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, on one rank."""
    parser = CommandParser()
    configure(parser)
    work = ["--num-streams", "1,3", "--input-len", "20,40", "--output-len", "8", "--rounds", "1"]
    measured = await measure(read_plan(parser.parse_args([*work, *FEW])))
    assert measured is not None
    assert [(each.num_streams, each.input_len) for each in measured] == [(1, 20), (3, 20), (1, 40)]
    for each in measured:
        assert each.step_ms > 0
        assert each.recorded_step_ms > 0
        share = each.leader
        assert share.num_steps >= 3
        assert sum(share.device.values()) == pytest.approx(share.period_ms)
        wanted = {"hand-over", "build batch", "embed", "attention", "linear", "logits", "sample"}
        assert {*wanted, "elementwise, norms", "other"} <= set(share.device)
        assert {"plan", "encode, send plan", "apply result"} <= set(share.loop)
    print_tables(measured)
    text = capsys.readouterr().out
    assert "3 streams of 20 + 8 tokens" in text
    assert "growth with running requests" in text
    assert "growth with context, 1 stream" in text


def test_a_sweep_ends_at_the_models_context() -> None:
    parser = CommandParser()
    configure(parser)
    plan = read_plan(parser.parse_args(["--sweep", "--output-len", "32"]))
    assert [each.input_len for each in plan.shapes_within(8224)][-3:] == [512, 2048, 8192]
    assert [each.input_len for each in plan.shapes_within(8192)][-3:] == [512, 2048, 8160]
    assert [each.input_len for each in plan.shapes_within(512)][-3:] == [128, 128, 480]
    assert plan.shapes_within(32) == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--num-streams", "0"], "--num-streams: expected numbers from 1 on such as 1,32, got '0'"),
        (["--input-len", "a,b"], "--input-len: expected numbers"),
        (["--output-len", "2"], "--output-len must be 8 or more, found 2"),
        (["--rounds", "0"], "--rounds must be 1 or more"),
        (["--num-streams", "300"], "--num-streams 300: only 256 requests run at the same time"),
        (["--input-len", "600"], "come to 632 tokens, the context is 512"),
    ],
)
def test_a_wrong_line_is_refused(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "steps", *line, *FEW]) == 1
    assert message in capsys.readouterr().err


async def test_steps_of_two_stages(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOENGINE_ADMIN_API_KEY", KEY)
    endpoint, output = tmp_path / "endpoint", tmp_path / "steps.json"
    line = ["--endpoint-file", str(endpoint), "--output", str(output)]
    with Launch(
        *("-pp", "2", "--admin-api-key", KEY, "--endpoint-file", str(endpoint), *FEW[:-1]),
        *("--model", str(STORIES)),
        command=rank_command(2),
    ) as launch:
        url = launch.wait_ready()
        assert main(["trace", "steps", *line, "--seconds", "1"]) == 0
        assert "no step ran within 1 s on every rank" in capfd.readouterr().out
        check_trace(json.loads(output.read_text()))

        async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as tasks:
            body = {"prompt": "Once", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
            answering = [tasks.create_task(post(session, "/v1/completions", body)) for _ in "ab"]
            recording = asyncio.get_running_loop().run_in_executor(
                None, main, ["trace", "steps", *line, "--steps", "12"]
            )
            assert await recording == 0
        first, second = (task.result() for task in answering)
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert main(["trace", "steps", *line, "--replica", "5"]) == 1
        assert "there is no replica '5'" in capfd.readouterr().err

    trace = json.loads(output.read_text())
    check_trace(trace)
    assert trace["otherData"]["notes"] == []
    steps = [spans_named(trace, "step ", rank) for rank in range(2)]
    assert [len(found) for found in steps] == [12, 12]
    sent, received = (
        spans_named(trace, "send to stage", 0),
        spans_named(trace, "receive from stage", 1),
    )
    assert len(sent) == len(received) == 12
    for (sending, _), (_, has_come) in zip(sent, received, strict=True):
        assert has_come > sending  # on one clock
