"""Faults on ranks of two replicas that stream: see support/chaos_faults.py for what is promised.

CI runs one fault of each kind on four ranks; `-m chaos` all of them on tp2·pp2·dp2, which
`python -m support.chaos_table` shows as a table.
"""

import statistics

import pytest
from support.chaos_case import Case, call_method, faulty_launch, run_case
from support.chaos_faults import MEDIAN_CLOSED_S, Fault, Role
from support.chaos_table import NUM_STREAMS, matrix
from support.known_requests import MAX_TOKENS, known_requests
from support.launching import STORIES
from support.sightings import patient_session

from aioengine.layout import ParallelLayout

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

PP2 = ParallelLayout(pp_size=2, dp_size=2)
TP2 = ParallelLayout(tp_size=2, dp_size=2)
WHOLE = ParallelLayout(tp_size=2, pp_size=2, dp_size=2)


async def check_case(fault: Fault, role: Role, layout: ParallelLayout) -> Case:
    requests = await known_requests(NUM_STREAMS, MAX_TOKENS)
    case = await run_case(fault, role.rank(layout), layout, requests)
    assert not case.problems(), "\n".join(case.problems())
    return case


@pytest.mark.parametrize(
    ("fault", "role", "layout"),
    [
        (Fault.SIGKILL, Role.LEADER, TP2),
        (Fault.SIGSTOP, Role.OUTPUT, PP2),
        (Fault.FORWARD, Role.PEER, TP2),
        (Fault.METHOD, Role.FRONT, PP2),
    ],
    ids=["killed leader", "stopped output rank", "forward raises on a peer", "method on rank 0"],
)
async def test_four_ranks(fault: Fault, role: Role, layout: ParallelLayout) -> None:
    await check_case(fault, role, layout)


async def test_collectives_of_two_methods_are_not_mixed_up() -> None:
    """Rank 0 waits for rank 1 in one method when rank 1 comes to that of the next method."""
    with faulty_launch(ParallelLayout(tp_size=2)) as launch:
        async with patient_session(launch.wait_ready()) as session:
            assert await call_method(session, "sum_in_group", 3.0) == "200 [6.0, 6.0]"
            raised = await call_method(session, "raise_instead_of_collective", 1)
            assert raised.startswith("500 rank 1 (")
            assert "have diverged" in await call_method(session, "sum_in_group", 3.0)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("fault", "role"),
    [(fault, role) for fault, role in matrix(Fault) if fault is not Fault.SIGKILL],
    ids=lambda value: value.name.lower(),
)
async def test_eight_ranks(fault: Fault, role: Role) -> None:
    await check_case(fault, role, WHOLE)


@pytest.mark.chaos
async def test_eight_ranks_killed() -> None:
    """One rank after the other, for the median."""
    cases = [await check_case(Fault.SIGKILL, role, WHOLE) for role in Role]
    assert statistics.median(case.error_s for case in cases) <= MEDIAN_CLOSED_S
