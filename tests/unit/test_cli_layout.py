"""`aioengine layout`, as a person types it."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from aioengine.cli.layout_facts import shown_bytes, shown_ranks
from aioengine.cli.main import COMMANDS, main
from aioengine.layout import AXES, ParallelLayout

LEGEND = "front end: serves HTTP · leader: schedules for its replica · output: samples tokens"
HINT = "--explain RANK says what one rank does, and with whom."
ESCAPE = "\x1b["


def lines(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """What `aioengine layout` prints, without rules and empty lines."""
    assert main(["layout", *argv]) == 0
    out = capsys.readouterr().out
    assert ESCAPE not in out
    return [line for line in out.splitlines() if line.strip("─")]


def test_the_tables_show_places_roles_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, "-tp", "2", "-pp", "2") == [
        "dp 1 × pp 2 × tp 2 = 4 processes: 1 replica of 4 ranks",
        "dp  pp  tp0  tp1  role",
        " 0   0    0    1  0: front end, leader",
        " 0   1    2    3  2: output",
        LEGEND,
        "axis      groups  whose ranks                                   which",
        "tp        2 of 2  compute every layer together                  0-1  2-3",
        "pp        2 of 2  hand hidden states on, stage to stage         0,2  1,3",
        "ep, eplb  2 of 2  share the experts of a mixture, if it is one  0-1  2-3",
        HINT,
    ]


def test_one_rank_has_every_role_and_no_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys) == [
        "dp 1 × pp 1 × tp 1 = 1 process: 1 replica of 1 rank",
        "dp  pp  tp0  role",
        " 0   0    0  0: front end, leader, output",
        LEGEND,
        HINT,
    ]


def test_axes_beyond_tp_pp_dp_appear_when_used(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-tp", "2", "-pcp", "2", "-dcp", "2", "--external-data-parallel-size", "2"]
    out = lines(capsys, *argv)
    assert out[0].startswith("external dp 2 × dp 1 × pp 1 × pcp 2 × tp 2 = 8 processes: 2 replicas")
    assert out[1].split("  ")[0] == "external dp"
    assert out[1].split()[2:] == ["dp", "pp", "pcp", "tp0", "tp1", "role"]
    assert out[3].split() == ["0", "0", "0", "1", "2", "3"]
    assert any(line.startswith("dcp       4 of 2  share the KV cache") for line in out)
    assert "does not run yet" in next(line for line in out if line.startswith("warning: "))


def test_every_leader_can_have_a_front_end(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, "-dp", "2", "--api-ranks", "leaders")
    assert out[3] == " 1   0    1  1: front end, leader, output"


# --- nodes


def test_groups_that_cross_a_node_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, "-tp", "2", "-pp", "2", "-dp", "2", "--nodes", "2")
    assert out[0].endswith("2 replicas of 4 ranks, on 2 nodes of 4")
    assert out[4].split() == ["1", "0", "4", "5", "1", "4:", "leader"]
    by_axis = {line.split()[0]: line for line in out}
    assert by_axis["tp"].endswith("0  0-1  2-3  4-5  6-7")
    assert by_axis["pp"].endswith("0  0,2  1,3  4,6  5,7")
    assert by_axis["dp"].endswith("4  0,4*  1,5*  2,6*  3,7*")
    assert not any(line.startswith("warning") for line in out)


def test_a_tp_group_that_crosses_a_node_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, "-tp", "2", "-pp", "4", "--gpus-per-node", "3")
    assert out[0].endswith("on 3 nodes of at most 3")
    (warning,) = (line for line in out if line.startswith("warning: "))
    assert warning.startswith("warning: 1 of 4 tp groups cross a node (ranks 2-3 are on nodes 0-1)")
    assert "divides the 3 ranks of a node" in warning


def test_nodes_and_gpus_say_how_many_processes_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = lines(capsys, "-tp", "4", "--nodes", "2", "--gpus-per-node", "8")
    assert out[0].startswith("dp 4 × pp 1 × tp 4 = 16 processes")
    assert lines(capsys, "-tp", "4", "--processes", "8")[0].startswith("dp 2 × pp 1 × tp 4 = 8")


# --- large launches


def test_a_large_launch_is_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-tp", "8", "-pp", "40", "-dp", "100"]
    out = lines(capsys, *sizes)
    assert len(out) < 40
    assert [line.split()[-2:] for line in out if "…  more" in line] == [
        ["more", "stages"],
        ["more", "replicas"],
        ["more", "stages"],
    ]
    assert any(line.split()[:3] == ["99", "39", "31992"] for line in out), "the last row is there"
    by_axis = {line.split()[0]: line for line in out}
    assert by_axis["tp"].endswith("  0-7  8-15  16-23  …  31992-31999")
    assert by_axis["pp"].endswith("  0,8,…,312  1,9,…,313  2,10,…,314  …  31687,31695,…,31999")


def test_all_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, "-tp", "2", "-pp", "10", "-dp", "10", "--all")
    assert [int(line.split()[2]) for line in out if line.split()[0].isdigit()] == [
        *range(0, 200, 2)
    ]
    (dp,) = (line for line in out if line.startswith("dp  ") and "same part" in line)
    assert dp.split("every replica")[1].split() == [
        ",".join(map(str, range(first, 200, 20))) for first in range(20)
    ]


def test_wide_tp_groups_are_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, "-tp", "16", "-pp", "2")
    assert out[1:4] == [
        "dp  pp  tp0-15  role",
        " 0   0    0-15  0: front end, leader",
        " 0   1   16-31  16: output",
    ]


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ([5], "5"),
        (range(4), "0-3"),
        ([0, 2], "0,2"),
        (range(0, 32, 8), "0,8,16,24"),
        (range(0, 64, 8), "0,8,…,56"),
        ([0, 1, 4, 5], "0-1,4-5"),
        ([0, 1, 4, 5, 8, 9, 12, 13], "0-1,4-5,…,12-13"),
        (range(100_000), "0-99999"),
    ],
)
def test_how_ranks_are_shown(ranks: list[int], shown: str) -> None:
    assert shown_ranks(ranks) == shown


def test_how_bytes_are_shown() -> None:
    sizes = [0, 1, 1023, 1024, 1536, 269_030_016, 2**40 - 1, 2**50]
    assert list(map(shown_bytes, sizes)) == [
        "0 B",
        "1 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "256.6 MiB",
        "1024 GiB",
        "1024 TiB",
    ]


# --- json


def test_json_is_the_layout_table(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["layout", "--tensor-parallel-size", "4", "-dcp", "2", "-dp", "2", "--json"]
    assert main(argv) == 0
    expected = ParallelLayout(tp_size=4, dcp_size=2, dp_size=2).table()
    assert json.loads(capsys.readouterr().out) == expected


def test_json_has_more_keys_only_for_more_flags(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["layout", "-tp", "2", "-dp", "2", "--gpus-per-node", "3", "--explain", "1", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    plain = ParallelLayout(tp_size=2, dp_size=2).table()
    assert {key: found.pop(key) for key in plain} == plain
    assert found["nodes"] == 2
    assert found["ranks_per_node"] == 3
    assert found["crossing_groups"] == {
        "tp": [[2, 3]],
        "dcp": [],
        "pcp": [],
        "pp": [],
        "dp": [[1, 3]],
        "ep": [[0, 1, 2, 3]],
    }
    assert list(found["crossing_groups"]) == list(plain["groups"]) == list(AXES[:-1])
    assert len(found["warnings"]) == 1
    assert "leader, rank 0" in found["explanation"]["what it does"]["peer"]


# --- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-tp", "3", "-dcp", "2"], "--decode-context-parallel-size 2 must divide"),
        (["-tp", "two"], "--tensor-parallel-size: expected int, got 'two'"),
        (["-pp", "0"], "--pipeline-parallel-size: expected int >= 1, got '0'"),
        (["-tp", "2", "--explain", "2"], "--explain 2: the ranks of this launch are 0 to 1"),
        (["-tp", "2", "--nodes", "3"], "2 processes cannot be shared evenly by --nodes 3"),
        (
            ["-tp", "2", "-dp", "2", "--nodes", "2", "--gpus-per-node", "4"],
            "--nodes 2 × --gpus-per-node 4: tp 2 × pp 1 × dp 2 = 4 processes, but 8 were",
        ),
        (
            ["--processes", "4", "--nodes", "2", "--gpus-per-node", "4"],
            "4 processes do not fit --nodes 2 × --gpus-per-node 4 = 8",
        ),
        (["-tp", "2", "--processes", "7"], "tp 2 × pp 1 = 2 processes does not divide the 7"),
        (["--external-data-parallel-size", "auto"], "--external-data-parallel-size auto is what"),
        (["-pp", "2", "--pipeline-layers", "1"], "--pipeline-layers: '1' names 1 stages"),
        (["--config", "nix.toml"], "--config nix.toml: No such file"),
    ],
)
def test_what_cannot_be_launched_is_one_line_on_stderr(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"aioengine layout: error: {message}")
    assert captured.err.count("\n") == 1


# --- as a process


def run_cli(*argv: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "aioengine.cli", "layout", *argv],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return done.stdout


def run_on_terminal(num_columns: int, *argv: str, **environment: str) -> str:
    """What a terminal of this width gets."""
    ours, theirs = pty.openpty()
    size = struct.pack("HHHH", 24, num_columns, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    out = b""
    with subprocess.Popen(
        [sys.executable, "-m", "aioengine.cli", "layout", *argv],
        stdout=theirs,
        env=os.environ | {"TERM": "xterm-256color"} | environment,
    ):
        os.close(theirs)
        try:
            while block := os.read(ours, 65536):
                out += block
        except OSError:  # Linux: EIO once the other end is closed
            pass
    os.close(ours)
    return out.decode().replace("\r\n", "\n")


WIDE = ["-tp", "8", "-pp", "4", "-dp", "4", "--nodes", "16"]


def test_a_terminal_gets_colour_and_lines_that_fit() -> None:
    out = run_on_terminal(80, *WIDE)
    assert "\x1b[1;32m0: front end, leader" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(map(len, plain.splitlines())) <= 80
    assert "120-127" in plain


def test_no_color_is_honoured() -> None:
    out = run_on_terminal(120, *WIDE, NO_COLOR="1")
    assert "0: front end, leader" in out
    assert ESCAPE not in out


def test_what_is_piped_is_plain_and_whole() -> None:
    out = run_cli(*WIDE, COLUMNS="80")
    assert ESCAPE not in out
    (line,) = (line for line in out.splitlines() if line.startswith("ep, eplb"))
    assert len(line) > 80
    assert line.endswith("  24-31,56-63,…,120-127*")


def test_a_reader_that_stops_early_causes_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "aioengine.cli", "layout", "-dp", "20000", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_layout_answers_without_torch() -> None:
    code = (
        "import sys; from aioengine.cli.main import main; "
        "main(['layout', '-tp', '2', '--nodes', '1']); main(['layout', '--explain', '0']); "
        "print('torch' in sys.modules, 'aiohttp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_settings_can_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('pipeline_parallel_size = 2\ndata_parallel_size = "auto"\nport = 1\n')
    out = lines(capsys, "--config", str(file), "--processes", "6")
    assert out[0].startswith("dp 3 × pp 2 × tp 1 = 6 processes")


# --- the command line as a whole


@pytest.mark.parametrize("argv", [["layout", "--nodes", "two"], ["layout", "--nonsense"], ["nix"]])
def test_wrong_usage_exits_with_1(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 1
    assert "aioengine" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert not caught.value.code
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in out
        assert command.summary in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("aioengine 0.")


def test_no_command_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "serve" in capsys.readouterr().out


def test_a_near_miss_is_answered_with_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["layout", "--tp", "2"])
    assert "did you mean -tp?" in capsys.readouterr().err
