"""AsyncEngine inside the ranks of a program that torchrun started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import STORIES

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support" / "embedded_ranks.py"
EXAMPLES = TESTS.parent / "launch" / "examples"
LIMIT_S = 120.0


def run(program: Path, *args: str, num_ranks: int = 2, fails: bool = False) -> str:
    """What the ranks printed; nothing of them is left when this returns."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(num_ranks), str(program), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{program.name} {args} hangs:\n{output}")
    assert (process.returncode != 0) == fails, output
    return output


def said(output: str, rank: int) -> list[str]:
    return re.findall(rf"^\[program {rank}\] (.*)$", output, re.MULTILINE)


@pytest.mark.parametrize("layout", ["tp2", "dp2", pytest.param("pp2", marks=pytest.mark.layouts)])
def test_training_and_generation_alternate(layout: str) -> None:
    """Five times, in the trainer's process group, with its thread blocked between phases."""
    output = run(PROGRAM, layout)
    replica = "[0]" if layout == "dp2" else "[0, 1]"
    assert said(output, 0) == [f"ranks {replica}", "done"]
    assert said(output, 1)[-1] == "done"


def test_without_a_process_group_of_the_programs_own() -> None:
    output = run(PROGRAM, "own_world", num_ranks=4)
    assert said(output, 0) == ["ranks [[0, 1], [2, 3]]", "last [1, 3]", "done"]
    for rank in (1, 3):
        refusals = said(output, rank)[:2]
        assert all(f"call it on its leader, rank {rank - 1}" in line for line in refusals)


def test_a_lost_rank_is_an_exception_and_the_program_goes_on() -> None:
    lines = said(run(PROGRAM, "loss", fails=True), 0)
    in_flight, *later, end = lines
    assert in_flight.startswith("in flight: rank 1 (dp0 pp0 tp1) host")
    assert len(later) == 3
    assert all(line.startswith("later: rank 1 (dp0 pp0 tp1) host") for line in later)
    assert end == "on_failure: ['RankLostError']; the program goes on"


@pytest.mark.parametrize(("who", "culprit"), [("leader", 0), ("peer", 1)])
def test_a_program_that_raises_keeps_nobody_waiting(who: str, culprit: int) -> None:
    output = run(PROGRAM, f"{who}_leaves")
    assert said(output, culprit) == ["own error"]
    (told,) = said(output, 1 - culprit)
    assert told.startswith(f"told: rank {culprit} (")
    assert told.endswith("its program has left the engine: ZeroDivisionError('mine')")


def test_failed_engines_leave_nothing_in_the_process() -> None:
    output = run(PROGRAM, "failures")
    for rank in (0, 1):
        (left,) = (line for line in said(output, rank) if line.startswith("left: "))
        assert left == "left: Counter(), []"
    assert re.match(r"alone: active\(\): rank 1 \(.* left the engine", said(output, 0)[-1])


def test_who_does_not_enter_a_phase_is_named() -> None:
    output = run(PROGRAM, "late")
    late, done = said(output, 0)
    assert re.match(
        r"late: active\(\): rank 1 \(dp0 pp0 tp1\) .* within its timeout of 0.2 s", late
    )
    assert done == said(output, 1)[0] == "done"


def test_the_examples() -> None:
    model = ("--model", str(STORIES))
    output = run(EXAMPLES / "generate.py", *model, "--tensor-parallel-size", "2")
    assert "'Once upon a time' -> ', there was a little girl" in output
    output = run(EXAMPLES / "train_and_generate.py", *model, "--rounds", "2")
    assert output.count("the trainer goes on") == 2
