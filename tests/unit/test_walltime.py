"""The end of a job, with a clock that stands still."""

import time

import pytest

from aioengine.control.walltime import Walltime


def walltime(end: float | None, margin_s: float, now: float) -> Walltime:
    return Walltime(end, margin_s, lambda: now)


@pytest.mark.parametrize(
    ("now", "until_end_s", "left_s", "until_drain_s"),
    [
        (0.0, 1000.0, 995.0, 940.0),
        (930.0, 70.0, 65.0, 10.0),
        (940.0, 60.0, 55.0, 0.0),
        (998.0, 2.0, 0.0, 0.0),
        (1000.0, None, None, None),  # the job goes on, so its end was moved
    ],
)
def test_what_an_end_leaves(
    now: float, until_end_s: float | None, left_s: float | None, until_drain_s: float | None
) -> None:
    job = walltime(1000.0, 60.0, now)
    assert (job.until_end_s, job.left_s, job.until_drain_s) == (until_end_s, left_s, until_drain_s)


def test_without_an_end_nothing_is_known() -> None:
    job = walltime(None, 60.0, 0.0)
    assert (job.until_end_s, job.left_s, job.until_drain_s) == (None, None, None)
    assert job.cause == "walltime: the job is about to end"


def test_no_margin_leaves_the_drain_to_signals() -> None:
    job = walltime(1000.0, 0.0, 999.0)
    assert (job.until_end_s, job.until_drain_s) == (1.0, None)


def test_the_cause_says_when() -> None:
    noon = time.mktime((2026, 1, 5, 12, 0, 0, 0, 0, -1))
    assert walltime(noon, 60.0, 0.0).cause == "walltime: the job ends at 12:00:00"
