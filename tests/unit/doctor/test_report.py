"""The report: a person finds every rank and sentence, a program every number."""

import io
import json
import subprocess
import sys

import pytest
from support.examinations import HEALTHY_DEVICE, block, change, examination, person

from aioengine.doctor.examination import Examination
from aioengine.doctor.judge import exit_status, judge
from aioengine.doctor.messages import Timing
from aioengine.doctor.report import PIPED_WIDTH, as_json, print_report


def printed(found: Examination) -> str:
    out = io.StringIO()
    print_report(found, judge(found), out)
    return out.getvalue()


def described(found: Examination) -> dict[str, object]:
    findings = judge(found)
    text = as_json(found, findings, exit_status(findings))
    assert "\n" not in text
    answer: dict[str, object] = json.loads(text)
    return answer


def test_a_healthy_launch() -> None:
    found = examination("aabb", tp_size=2, pp_size=2)
    found.timings = [
        Timing(
            group="tp:0",
            ranks=(0, 1),
            operation="all_reduce",
            backend="shm",
            latency_us=3.4,
            gb_per_s=None,
        )
    ]
    text = printed(found)
    assert text.startswith("aioengine doctor: 4 ranks = pp 2 × tp 2\n")
    assert "\x1b" not in text  # no colour without a terminal
    assert text.rstrip().endswith("ok: nothing found in 2.0 s")
    assert "TCP: 12 of 12 ways between ranks work" in text
    assert "between hosts: median 80 µs" in text
    assert any(
        line.split() == ["tp", "0,", "1", "all_reduce", "shm", "3", "µs", "-"]
        for line in text.splitlines()
    )


def test_every_rank_that_is_not_here_has_a_row() -> None:
    found = examination("aab")
    del found.ranks[2]
    found.cells = [cell for cell in found.cells if 2 not in (cell.source, cell.target)]
    found.again.append(person(1, "b"))
    rows = [line.split() for line in printed(found).splitlines()]
    assert ["2", "missing"] in rows
    assert any(row[:1] == ["1"] and row[-2:] == ["there", "already"] for row in rows)


def test_findings_are_whole_lines_however_long() -> None:
    found = examination("aabb")
    block(found, 0, 2, failed="connect", error="x" * PIPED_WIDTH)
    text = printed(found)
    assert judge(found)[0].text in text
    assert "no connect" in text
    assert "1 fault, 0 warnings" in text


def test_text_from_other_hosts_is_not_markup() -> None:
    found = examination("ab")
    change(found, 1, host="[bold]b[/]", variables={"NCCL_DEBUG": "[red]"})
    text = printed(found)
    assert "[bold]b[/]" in text
    assert "NCCL_DEBUG=[red]" in text


def test_a_large_launch_shows_whom_the_findings_name() -> None:
    found = examination("a" * 100)
    found.ranks[97].left = "connection closed"
    text = printed(found)
    assert "64 of 100 ranks are shown" in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:1] == ["97"] and row[-1:] == ["left"] for row in rows)


def test_the_object_has_what_the_tables_have() -> None:
    found = examination("ab")
    found.ranks[1].device = None
    found.ranks[1].silent_in = "the TCP matrix"
    answer = described(found)
    assert answer["status"] == "fault"
    assert answer["exit_status"] == 1
    ranks = answer["ranks"]
    assert isinstance(ranks, list)
    assert [(rank["rank"], rank["host"], rank["silent_in"]) for rank in ranks] == [
        (0, "a", ""),
        (1, "b", "the TCP matrix"),
    ]
    assert ranks[0]["device"]["matmul_ms"] == HEALTHY_DEVICE.matmul_ms
    assert ranks[1]["device"] is None
    (finding,) = answer["findings"]  # type: ignore[misc]
    assert finding["kind"] == "silent"
    assert finding["ranks"] == [1]


@pytest.mark.parametrize(("spoil", "status"), [(False, "ok"), (True, "warning")])
def test_the_status_of_the_object(spoil: bool, status: str) -> None:
    found = examination("ab")
    if spoil:
        change(found, 1, mtu=9000)
    answer = described(found)
    assert answer["status"] == status
    assert answer["exit_status"] == 0


def test_judgement_and_report_need_no_torch() -> None:
    code = (
        "import sys, aioengine.doctor.judge, aioengine.doctor.report; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
