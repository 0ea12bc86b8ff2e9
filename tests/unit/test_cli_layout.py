"""`aioengine layout`, as a person types it."""

import json
import subprocess
import sys

import pytest

from aioengine.cli.main import COMMANDS, main
from aioengine.layout import ParallelLayout


def test_the_table_shows_places_roles_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "-tp", "2", "-pp", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "dp 1 × pp 2 × tp 2 = 4 processes",
        "",
        "rank  dp  pp  tp  role",
        "0     0   0   0   front end, leader",
        "1     0   0   1",
        "2     0   1   0   output",
        "3     0   1   1",
        "",
        "group  its ranks",
        "tp     share every layer                  [0 1] [2 3]",
        "pp     stages, first to last              [0 2] [1 3]",
        "ep     experts (mixture of experts only)  [0 1] [2 3]",
    ]


def test_one_rank_has_every_role_and_no_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "dp 1 × pp 1 × tp 1 = 1 process",
        "",
        "rank  dp  pp  tp  role",
        "0     0   0   0   front end, leader, output",
    ]


def test_axes_beyond_tp_pp_dp_appear_when_used(capsys: pytest.CaptureFixture[str]) -> None:
    main(["layout", "-tp", "2", "-pcp", "2", "-dcp", "2", "--external-data-parallel-size", "2"])
    out = capsys.readouterr().out
    assert "external_dp 2 × dp 1 × pp 1 × pcp 2 × tp 2 = 8 processes" in out
    assert "rank  external_dp  dp  pp  pcp  tp  role" in out
    assert "dcp    share the KV cache of a tp group   [0 1] [2 3] [4 5] [6 7]" in out


def test_json_is_the_layout_table(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["layout", "--tensor-parallel-size", "4", "-dcp", "2", "-dp", "2", "--json"]
    assert main(argv) == 0
    expected = ParallelLayout(tp_size=4, dcp_size=2, dp_size=2).table()
    assert json.loads(capsys.readouterr().out) == expected


def test_sizes_that_do_not_fit_are_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "-tp", "3", "-dcp", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("aioengine layout: error: --decode-context-parallel-size 2")


@pytest.mark.parametrize(
    "argv", [["layout", "-tp", "two"], ["layout", "--nonsense"], ["nonsense"], []]
)
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


def test_layout_starts_without_torch() -> None:
    code = (
        "import sys; from aioengine.cli.main import main; main(['layout', '-tp', '2']); "
        "print('torch' in sys.modules, 'aiohttp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
