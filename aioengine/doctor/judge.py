"""An examination's findings, worst first, and the status that every rank exits with. Pure."""

from collections.abc import Sequence

from aioengine.doctor.examination import Examination
from aioengine.doctor.finding import Finding
from aioengine.doctor.judge_hosts import judge_hosts
from aioengine.doctor.judge_links import judge_links
from aioengine.doctor.judge_presence import judge_presence


def judge(found: Examination) -> list[Finding]:
    findings = [*judge_presence(found), *judge_hosts(found), *judge_links(found)]
    # Groups fail because of something: that comes first.
    return sorted(findings, key=lambda f: (f.severity != "fault", f.kind == "groups"))


def exit_status(findings: Sequence[Finding]) -> int:
    """0 when the launch should work, if not at its best; 1 on a fault."""
    return int(any(finding.severity == "fault" for finding in findings))
