"""One finding of an examination, and how findings name ranks and hosts. Pure."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from aioengine.doctor.messages import Facts

Severity = Literal["warning", "fault"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault is what the real launch would fail, hang or be refused on; a warning is what makes
    it slow or fragile."""

    severity: Severity
    kind: str
    """One word for programs: missing, twice, loopback, slow, …"""
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str
    """Names the ranks and hosts, and says what to do."""


def finding(severity: Severity, kind: str, about: Iterable[Facts], text: str) -> Finding:
    about = list(about)
    return Finding(
        severity=severity,
        kind=kind,
        ranks=tuple(sorted({facts.rank for facts in about})),
        hosts=tuple(sorted({facts.host for facts in about})),
        text=text,
    )


def who(facts: Facts) -> str:
    return f"rank {facts.rank} ({facts.coords}) on host {facts.host}, pid {facts.pid},"


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 2, 5", "ranks 4-9, 12"."""
    ranks = sorted(set(ranks))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers, runs of three and more as first-last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run))
    return ", ".join(parts)


def by_host(about: Iterable[Facts]) -> str:
    """ "ranks 0, 1 on host a; rank 2 on host b"."""
    hosts: dict[str, list[int]] = {}
    for facts in about:
        hosts.setdefault(facts.host, []).append(facts.rank)
    return "; ".join(f"{ranks_text(ranks)} on host {host}" for host, ranks in hosts.items())


def host_of(one: Facts) -> tuple[str, str]:
    """What has addresses of its own: a container is a host, too."""
    return one.machine, one.network


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
