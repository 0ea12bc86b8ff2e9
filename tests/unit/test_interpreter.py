"""The interpreter of a rank that is ready."""

import gc
import sys
from collections.abc import Iterator

import pytest

from aioengine.rank.interpreter import SWITCH_INTERVAL_S, THRESHOLDS, settle_interpreter


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_exists_is_not_looked_at_again() -> None:
    kept = Node()
    num_before = len(gc.get_objects())
    settle_interpreter()
    assert gc.get_freeze_count() > 0.9 * num_before
    assert not any(one is kept for one in gc.get_objects())


def test_cycles_that_requests_leave_are_still_found() -> None:
    settle_interpreter()
    assert gc.isenabled()
    for _ in range(4 * THRESHOLDS[0]):
        Node()  # a cycle that only the collector can free
    num_alive = sum(isinstance(one, Node) for one in gc.get_objects())
    assert num_alive <= THRESHOLDS[0]


def test_threads_do_not_wait_long_for_each_other() -> None:
    settle_interpreter()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
