"""Findings about the ways between ranks: blocked, slow, groups that cross hosts. Pure.

A host or rank is slow when even its quickest way to another one is much slower than the median's
quickest: who is fine has at least one quick way, whoever else is slow. Ways on one host and between
hosts are compared among themselves. What is slow for everybody is judged by absolute limits.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from aioengine.doctor.examination import Examination
from aioengine.doctor.finding import Finding, by_host, finding, host_of, is_loopback, ranks_text
from aioengine.doctor.messages import Cell, Facts

SLOW_RATIO: Final = 4.0
SLOW_MARGIN_US: Final = {"on one host": 2000.0, "between hosts": 1000.0}
"""Slower than the median by both: a ratio alone would name whoever the scheduler kept waiting."""
SLOW_PAIR_RATIO: Final = 10.0
SLOW_PAIR_MARGIN_US: Final = 5000.0
MAX_ROUND_TRIP_US: Final = 5000.0
"""Between hosts. A step of a pipeline waits this long for every stage, of tp for every layer."""
SLOW_GROUP_RATIO: Final = 4.0
SLOW_GROUP_MARGIN_US: Final = 2000.0
MIN_TO_COMPARE: Final = 3
MAX_NAMED: Final = 4
ADVICE: Final = {
    "connect": "a firewall between them, or an address of another network: open all TCP ports "
    "between the hosts, or choose another interface with --host-ip",
    "proof": "the connection is taken but nothing is answered: the process is stopped, its host "
    "hangs, or something else answers at that address",
    "echo": "another host has the same address, or the connection broke",
    "load": "small packets pass and large ones do not: compare the MTU of interfaces, switches and "
    "tunnels",
}

Way = tuple[Facts, Facts, Cell]


def judge_links(found: Examination) -> Iterator[Finding]:
    facts = {rank: person.facts for rank, person in found.ranks.items()}
    ways = [(facts[cell.source], facts[cell.target], cell) for cell in found.cells]
    yield from _blocked([way for way in ways if way[2].failed], found)
    good = [way for way in ways if not way[2].failed]
    for kind in SLOW_MARGIN_US:
        yield from _slow(kind, [way for way in good if kind_of(*way[:2]) == kind])
    yield from _mtu(list(facts.values()))
    yield from _slow_groups(found, facts)
    yield from _crossing_groups(found, facts)


def kind_of(a: Facts, b: Facts) -> str:
    return "on one host" if host_of(a) == host_of(b) else "between hosts"


# --- blocked -------------------------------------------------------------------------------------


def _blocked(ways: list[Way], found: Examination) -> Iterator[Finding]:
    """One finding for each pair of hosts and kind of failure."""
    ill = {rank for rank, p in found.ranks.items() if p.left or p.silent_in}
    groups: dict[tuple[Hashable, Hashable, str], list[Way]] = defaultdict(list)
    for source, target, cell in ways:
        if cell.failed == "untried" or {source.rank, target.rank} & ill:
            continue  # nothing is known, or it is named already
        if is_loopback(target.address) and kind_of(source, target) == "between hosts":
            continue  # that is a finding of its own
        key = (host_of(source), host_of(target), cell.failed)
        groups[key].append((source, target, cell))
    for (*_, failed), some in groups.items():
        source, target, cell = some[0]
        pairs = [f"rank {s.rank} to rank {t.rank}" for s, t, _ in some[:MAX_NAMED]]
        if len(some) > MAX_NAMED:
            pairs.append(f"and {len(some) - MAX_NAMED} more")
        assert target.probe is not None
        yield finding(
            "fault",
            "blocked",
            [one for s, t, _ in some for one in (s, t)],
            f"{', '.join(pairs)}: no way from host {source.host} ({source.address}) to host "
            f"{target.host} ({target.address}). Rank {source.rank} at port {target.probe.port}: "
            f"{cell.error}. Likely {ADVICE[failed]}",
        )


# --- slow ----------------------------------------------------------------------------------------


def _slow(kind: str, ways: list[Way]) -> Iterator[Finding]:
    """Slow hosts, then slow ranks of the other hosts, then single slow ways."""
    units: tuple[Callable[[Facts], Hashable], ...] = (lambda one: one.rank,)
    if kind == "between hosts":
        units = (host_of, *units)
    for unit in units:
        slow, best, usual = _outliers(ways, unit, SLOW_MARGIN_US[kind])
        if slow:
            yield finding(
                "warning",
                "slow",
                slow,
                f"{by_host(slow)}: slow to reach {kind}: {ms(best)} there and back at best, "
                f"{ms(usual)} for the median. Look at that host's load, cable, switch port and "
                "--host-ip",
            )
        ranks = {one.rank for one in slow}
        ways = [way for way in ways if not {way[0].rank, way[1].rank} & ranks]
    yield from _slow_pairs(ways)
    if kind == "between hosts":
        yield from _far(ways)


def _outliers(
    ways: list[Way], unit: Callable[[Facts], Hashable], margin_us: float
) -> tuple[list[Facts], float, float]:
    """The ranks of slow units (hosts, or ranks), the best round trip of any of them in µs, and
    the median unit's best."""
    members: dict[Hashable, dict[int, Facts]] = defaultdict(dict)
    best: dict[Hashable, float] = {}
    for source, target, cell in ways:
        for one in (source, target):
            members[unit(one)][one.rank] = one
            best[unit(one)] = min(best.get(unit(one), math.inf), _us(cell))
    if len(best) < MIN_TO_COMPARE:
        return [], 0.0, 0.0
    usual = statistics.median(best.values())
    slow = [key for key, us in best.items() if us > max(SLOW_RATIO * usual, usual + margin_us)]
    ranks = {rank: one for key in slow for rank, one in members[key].items()}
    quickest = min((best[key] for key in slow), default=0.0)
    return [one for _, one in sorted(ranks.items())], quickest, usual


def _slow_pairs(ways: list[Way]) -> Iterator[Finding]:
    """Single ways that are much slower than the usual one, between ranks that are not slow."""
    if len(ways) < MIN_TO_COMPARE:
        return
    usual = statistics.median(_us(cell) for *_, cell in ways)
    limit = max(SLOW_PAIR_RATIO * usual, usual + SLOW_PAIR_MARGIN_US)
    slow = sorted((w for w in ways if _us(w[2]) > limit), key=lambda way: -_us(way[2]))
    if slow:
        named = [
            f"rank {s.rank} (host {s.host}) to rank {t.rank} (host {t.host}) {ms(_us(cell))}"
            for s, t, cell in slow[:MAX_NAMED]
        ]
        more = f" and {len(slow) - MAX_NAMED} more" if len(slow) > MAX_NAMED else ""
        yield finding(
            "warning",
            "slow_way",
            [one for s, t, _ in slow for one in (s, t)],
            f"slow ways: {', '.join(named)}{more}; the median is {ms(usual)} there and back",
        )


def _far(ways: list[Way]) -> Iterator[Finding]:
    """Pairs of hosts that are far from each other, whatever the others are."""
    pairs: dict[tuple[Hashable, Hashable], list[Way]] = defaultdict(list)
    for source, target, cell in ways:
        first, second = sorted((source, target), key=host_of)
        pairs[host_of(first), host_of(second)].append((first, second, cell))
    for some in pairs.values():
        quickest = min(_us(cell) for *_, cell in some)
        if quickest > MAX_ROUND_TRIP_US:
            a = {first.rank: first for first, *_ in some}
            b = {second.rank: second for _, second, _ in some}
            yield finding(
                "warning",
                "slow",
                [*a.values(), *b.values()],
                f"{by_host(a.values())} and {by_host(b.values())} are slow to reach from each "
                f"other: {ms(quickest)} there and back at best. Look at the load, cables and "
                "switches of both, and whether --host-ip picks the fast network",
            )


def _mtu(facts: list[Facts]) -> Iterator[Finding]:
    groups: dict[int, list[Facts]] = defaultdict(list)
    for one in facts:
        if one.mtu is not None and one.interface != "lo":
            groups[one.mtu].append(one)
    if len(groups) > 1:
        shown = "; ".join(f"{mtu}: {by_host(some)}" for mtu, some in sorted(groups.items()))
        yield finding(
            "warning",
            "mtu",
            [one for some in groups.values() for one in some],
            f"interfaces differ in MTU ({shown}); large transfers may stall",
        )


# --- groups --------------------------------------------------------------------------------------


def _slow_groups(found: Examination, facts: dict[int, Facts]) -> Iterator[Finding]:
    """Among groups of one axis that do the same operation through the same backend."""
    kinds: dict[tuple[str, str, str, int], list[tuple[float, tuple[int, ...]]]] = defaultdict(list)
    for timing in found.timings:
        if timing.latency_us is not None:
            axis = timing.group.partition(":")[0]
            key = (axis, timing.operation, timing.backend, len(timing.ranks))
            kinds[key].append((timing.latency_us, timing.ranks))
    for (axis, operation, backend, _), timed in kinds.items():
        if len(timed) < MIN_TO_COMPARE:
            continue
        usual = statistics.median(us for us, _ in timed)
        for us, ranks in timed:
            if us > max(SLOW_GROUP_RATIO * usual, usual + SLOW_GROUP_MARGIN_US):
                some = [facts[rank] for rank in ranks]
                yield finding(
                    "warning",
                    "slow_group",
                    some,
                    f"{axis} group of {by_host(some)}: {operation} over {backend} takes {ms(us)}, "
                    f"{ms(usual)} in the median group",
                )


def _crossing_groups(found: Examination, facts: dict[int, Facts]) -> Iterator[Finding]:
    size = found.sizes["tp"]
    crossing = []
    for first in range(0, found.world_size, size):
        here = [facts[rank] for rank in range(first, first + size) if rank in facts]
        if len({host_of(one) for one in here}) > 1:
            crossing.append(here)
    if crossing:
        shown = "; ".join(f"[{by_host(here)}]" for here in crossing[:MAX_NAMED])
        yield finding(
            "warning",
            "crossing",
            [one for here in crossing for one in here],
            f"tensor-parallel groups of {ranks_text(one.rank for h in crossing for one in h)} "
            f"cross hosts: {shown}. "
            "Every layer then waits for the network; prefer -tp inside hosts and -pp between them",
        )


def ms(microseconds: float) -> str:
    """As a person reads it."""
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.1f} ms"


def _us(cell: Cell) -> float:
    assert cell.round_trip_us is not None
    return cell.round_trip_us
