"""`aioengine trace steps`: what becomes of the server's answer, and what is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.chrome_traces import check_trace, spans_named
from support.recordings import recorded, step

from aioengine.cli import trace_steps
from aioengine.cli.main import main
from aioengine.cli.trace_steps import notes, read_recordings
from aioengine.timeline.probe import Kind
from aioengine.trace_messages import RecordedSteps

FOUND = recorded(
    [step(seq, 10 * seq, 10 * seq + 8) for seq in range(4, 9)], [(Kind.LINEAR, 61, 62)]
)
DEAD = {"rank": 1, "coords": "tp1", "host": "h", "pid": 8, "error": "it ended while it recorded"}


def answer(found: RecordedSteps = FOUND, *, wanted: int = 3) -> dict[str, Any]:
    """As it comes over HTTP: rank 0 has recorded, rank 1 has died."""
    rank = {
        "rank": 0,
        "coords": "tp0",
        "host": "h",
        "pid": 7,
        "error": None,
        "first_seq": 5,
        "clock": {"offset_ns": 0, "error_ns": 900},
        "recorded": found,
    }
    body = {"status": "ok", "steps": wanted, "seconds": 2, "ranks": [rank, DEAD]}
    loaded: dict[str, Any] = json.loads(msgspec.json.encode(body))
    return loaded


def test_steps_from_the_common_one_on_are_shown() -> None:
    (recording,) = read_recordings(answer())
    assert recording.title == "rank 0 (tp0) host h pid 7"
    assert [each.seq for each in recording.steps] == [5, 6, 7]
    assert recording.clock.error_ns == 900
    assert recording.recorded == FOUND


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        (FOUND, 3, []),
        (FOUND, 9, ["only 4 of 9 steps ran within 2 s on every rank"]),
        (recorded([], []), 9, ["no step ran within 2 s on every rank"]),
        (
            msgspec.structs.replace(FOUND, is_cut=True, error="rank 1 is gone"),
            3,
            [
                "rank 0 (tp0) host h pid 7: the recording ended early: rank 1 is gone",
                "rank 0 (tp0) host h pid 7: there was no room for all spans",
            ],
        ),
    ],
)
def test_what_is_missing_is_said(found: RecordedSteps, wanted: int, said: list[str]) -> None:
    asked = answer(found, wanted=wanted)
    dead, *others = notes(asked, list(read_recordings(asked)))
    assert dead == "rank 1 (tp1) host h pid 8: it ended while it recorded"
    assert others == said


def test_a_trace_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    def fetch(args: Any, path: str, works_s: float) -> Any:
        asked.append((path, works_s))
        return answer()

    monkeypatch.setattr(trace_steps, "fetch", fetch)
    output = tmp_path / "steps.json"
    line = ["trace", "steps", "--steps", "3", "--seconds", "2", "--replica", "0"]
    assert main([*line, "--output", str(output)]) == 0
    assert asked == [("/trace/steps?steps=3&seconds=2&replica=0", 2)]
    trace = json.loads(output.read_text())
    check_trace(trace)
    assert len(spans_named(trace, "step ", 0)) == 3
    assert trace["otherData"]["clock_offsets"] == {
        "rank 0 (tp0) host h pid 7": {"offset_ns": 0, "error_bound_ns": 900}
    }
    out = capsys.readouterr().out
    assert "rank 0 (tp0)" in out
    assert f"{output}: open it at https://ui.perfetto.dev" in out
    assert main([*line, "--output", str(tmp_path / "no" / "where")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps must be from 1 to 1000, found 0"),
        (["--seconds", "61"], "--seconds must be from 1 to 60, found 61"),
        (["--url", "localhost"], "--url must begin with http:// or https://"),
    ],
)
def test_a_wrong_line_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "steps", "--admin-api-key", "k", *flags]) == 1
    assert f"aioengine trace steps: error: {message}" in capsys.readouterr().err
