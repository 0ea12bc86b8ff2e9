"""Findings about who came: missing, twice, cut off, silent, stuck. Pure."""

from collections.abc import Iterator
from typing import Final

from aioengine.doctor.examination import Examination, Person
from aioengine.doctor.finding import Finding, by_host, finding, host_of, who
from aioengine.doctor.messages import Facts
from aioengine.layout import ParallelLayout

MAX_NAMED: Final = 8


def judge_presence(found: Examination) -> Iterator[Finding]:
    if found.interrupted:
        yield Finding(
            severity="fault",
            kind="interrupted",
            ranks=(),
            hosts=(),
            text=f"{found.interrupted} ended the examination early. A launcher ends all ranks when "
            "one of them has failed: look at its summary and at the other ranks' output",
        )
    if missing := [rank for rank in found.missing if rank not in found.unheard]:
        yield _missing(found, missing)
    yield from _unheard(found)
    yield from _cut_off(found)
    yield from _twice(found)
    for person in found.strays:
        yield finding(
            "fault",
            "world_size",
            [person.facts],
            f"{who(person.facts)} was told that it is one of {person.facts.world_size} ranks, "
            f"rank 0 that it is one of {found.world_size}: two launches share one rendezvous, or "
            "nodes were started with different numbers of processes",
        )
    yield from _silent(found)
    yield from _failed_groups(found)
    for person in found.ranks.values():
        yield from _unwell(person, found)


def _missing(found: Examination, missing: list[int]) -> Finding:
    sizes = {f"{name}_size": size for name, size in found.sizes.items()}
    layout = ParallelLayout(**sizes)
    named = [f"rank {rank} ({layout.coords(rank)})" for rank in missing[:MAX_NAMED]]
    if len(missing) > MAX_NAMED:
        named.append(f"and {len(missing) - MAX_NAMED} more")
    hosts = tuple(dict.fromkeys(person.facts.host for person in found.ranks.values()))
    expected = _hosts_of(missing, found)
    limit = (
        f"{found.seconds:.1f} s"
        if found.interrupted
        else f"--startup-timeout-seconds {found.limit_s:g}"
    )
    rendezvous = next((p.facts.rendezvous for p in found.ranks.values()), "the rendezvous host")
    return Finding(
        severity="fault",
        kind="missing",
        ranks=tuple(missing),
        hosts=expected,
        text=f"{', '.join(named)} of {found.world_size} missing: did not come within {limit}. "
        f"Hosts seen: {', '.join(hosts)}. "
        f"{_where_expected(expected)}Look at the missing rank's own output, whether its process "
        f"was started and is not stopped, and whether its host reaches {rendezvous}",
    )


def _hosts_of(missing: list[int], found: Examination) -> tuple[str, ...]:
    """Where the missing ranks belong by their number, when every node has as many ranks and
    somebody else of theirs came; empty when that is not known."""
    per_node = {person.facts.local_world_size for person in found.ranks.values()}
    if len(per_node) != 1:
        return ()
    size = per_node.pop()
    nodes = {rank // size for rank in missing}
    mates = (person for rank, person in found.ranks.items() if rank // size in nodes)
    return tuple(sorted({mate.facts.host for mate in mates}))


def _where_expected(hosts: tuple[str, ...]) -> str:
    if hosts:
        return f"By the numbers that belongs on host {', '.join(hosts)}. "
    return "No rank of the same node came. "


def _unheard(found: Examination) -> Iterator[Finding]:
    for rank, caller in sorted(found.unheard.items()):
        if rank in found.ranks:
            continue  # it came again
        cause = (
            f"never arrived: {caller.reason}. Look at its own output, and whether it runs the same "
            "version of aioengine"
            if caller.reason
            else "(a few KiB) never arrived: small packets pass and large ones do not. Compare the "
            "MTU of interfaces, switches and tunnels"
        )
        yield Finding(
            severity="fault",
            kind="unheard",
            ranks=(rank,),
            hosts=(),
            text=f"rank {rank} at {caller.address} connected to rank 0 and proved itself, but what "
            f"it says of itself {cause}",
        )


def _cut_off(found: Examination) -> Iterator[Finding]:
    reasons: dict[str, list[Facts]] = {}
    for guest in found.cut_off:
        if guest.facts.rank not in found.ranks:  # else it got through after all
            reasons.setdefault(guest.reason, []).append(guest.facts)
    rank0 = [person.facts for rank, person in found.ranks.items() if rank == 0]
    for reason, some in reasons.items():
        yield finding(
            "fault",
            "cut_off",
            [*some, *rank0],
            f"{by_host(some)}: cut off: reaches the launcher's store, but not {by_host(rank0)}: "
            f"{reason}. If the address is right, open all TCP ports between the hosts (--host-ip "
            "chooses another interface); AIOENGINE_JOB_SECRET, if set, must be the same everywhere",
        )


def _twice(found: Examination) -> Iterator[Finding]:
    for rank in sorted({person.facts.rank for person in found.again}):
        claimants = [p for p in found.again if p.facts.rank == rank]
        if rank in found.ranks:
            claimants.insert(0, found.ranks[rank])
        places = " and ".join(f"pid {p.facts.pid} on host {p.facts.host}" for p in claimants)
        yield finding(
            "fault",
            "twice",
            [p.facts for p in claimants],
            f"rank {rank} is there {'twice' if len(claimants) == 2 else f'{len(claimants)} times'}"
            f": {places}. Two launches share one rendezvous, a node was started twice, or RANK "
            "(--node-rank) was set by hand to the same number",
        )


def _silent(found: Examination) -> Iterator[Finding]:
    groups: dict[tuple[object, str], list[Facts]] = {}
    for person in found.ranks.values():
        if person.silent_in and not person.left:
            key = (host_of(person.facts), person.silent_in)
            groups.setdefault(key, []).append(person.facts)
    for (_, where), some in groups.items():
        pids = ", ".join(str(one.pid) for one in some)
        yield finding(
            "fault",
            "silent",
            some,
            f"{by_host(some)}, pid {pids}: stopped answering (asked for {where}): the process is "
            "stopped (SIGSTOP, a debugger), the host hangs, or the network between it and rank 0 "
            "broke",
        )


def _failed_groups(found: Examination) -> Iterator[Finding]:
    reasons: dict[str, list[Facts]] = {}
    for person in found.ranks.values():
        if person.failed and not _is_explained(person, found):
            reasons.setdefault(person.failed, []).append(person.facts)
    for reason, some in reasons.items():
        yield finding(
            "fault", "groups", some, f"{by_host(some)}: the process groups failed: {reason}"
        )


def _unwell(person: Person, found: Examination) -> Iterator[Finding]:
    facts = person.facts
    if person.left:
        yield finding(
            "fault",
            "left",
            [facts],
            f"{who(facts)} ended during the examination ({person.left}); look at its own output",
        )
    if person.stuck_in and not _is_explained(person, found):
        yield finding(
            "fault",
            "stuck",
            [facts],
            f"{who(facts)} answers, but its device thread does not come back from "
            f"{person.stuck_in}; look at the driver's messages (dmesg, nvidia-smi) on its host",
        )


def _is_explained(person: Person, found: Examination) -> bool:
    """A rank of the same replica is gone or silent, so this one waited in vain."""
    sizes = found.sizes
    size = sizes["tp"] * sizes["pp"] * sizes["pcp"]
    leader = person.facts.rank - person.facts.rank % size
    mates = (found.ranks.get(rank) for rank in range(leader, leader + size))
    return any(mate is None or mate.left or mate.silent_in for mate in mates)
