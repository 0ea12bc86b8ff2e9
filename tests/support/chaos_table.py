"""`python -m support.chaos_table [--layout 2,2] [FAULT...]`: the whole failure matrix as a table.

Every fault on every role, and torchrun's agent killed; each in a launch of its own. Needs the
shared model; run in `tests/`, with the repository in PYTHONPATH.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from support.chaos_case import Case, run_case
from support.chaos_faults import FAILED, RESET, Fault, Role
from support.known_requests import MAX_TOKENS, known_requests
from support.sightings import summary

from aioengine.layout import ParallelLayout

NUM_STREAMS: Final = 4
"""On each replica."""

HEADER: Final = (
    "fault",
    "on",
    "clients of the failed replica",
    "error after",
    "clients of the other replica",
    "caller",
    "exit status by rank",
    "failed ranks gone after",
    "left: processes, shm",
    "as promised",
)


def matrix(faults: Iterable[Fault]) -> Iterator[tuple[Fault, Role]]:
    for fault in faults:
        yield from ((fault, role) for role in (Role if fault.is_of_rank else [Role.FRONT]))


def row(case: Case, role: Role) -> tuple[str, ...]:
    endings = {seen.ending for seen in case.failed_clients}
    failed = bool(endings & (FAILED | RESET))
    is_named = all(f"rank {case.victim} (" in seen.message for seen in case.failed_clients)
    outlasting = f", {case.num_outlasting} outlasted" if case.num_outlasting and failed else ""
    statuses = " ".join(str(status) for _, status in sorted(case.statuses.items()))
    return (
        case.fault.value,
        f"{role.value}: {case.victim}" if case.fault.is_of_rank else "the launcher",
        f"{summary(case.failed_clients)}{' naming it' if is_named else ''}",
        f"{case.error_s:.2f} s" if failed else "–",
        f"{summary(case.other_clients)}{outlasting}",
        case.caller_saw.split(" ")[0] or "–",
        statuses,
        f"{case.gone_s:.1f} s" if case.promise.gone_ranks else "–",
        f"{case.num_processes_left}, {len(case.shared_memory_left)}",
        "; ".join(case.problems()) or "yes",
    )


def medians(cases: Iterable[Case]) -> Iterator[str]:
    """Of the time to the error, by fault."""
    by_fault: dict[Fault, list[float]] = {}
    for case in cases:
        if case.fault is not Fault.METHOD:
            by_fault.setdefault(case.fault, []).append(case.error_s)
    for fault, seconds in by_fault.items():
        yield f"{fault.value}: median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s"


def say(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="2,2", metavar="TP,PP", help="of each of two replicas")
    parser.add_argument("faults", nargs="*", type=Fault.__getitem__, default=list(Fault))
    args = parser.parse_args()
    tp_size, pp_size = map(int, args.layout.split(","))
    layout = ParallelLayout(tp_size=tp_size, pp_size=pp_size, dp_size=2)
    requests = await known_requests(NUM_STREAMS, MAX_TOKENS)
    cases = []
    say(HEADER)
    say("---" for _ in HEADER)
    for fault, role in matrix(args.faults):
        case = await run_case(fault, role.rank(layout), layout, requests)
        say(row(case, role))
        cases.append(case)
    print("\nerror at the clients after", *medians(cases), sep="\n- ")
    return int(any(case.problems() for case in cases))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
