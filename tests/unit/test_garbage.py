"""The cycle collector of a rank that is ready."""

import gc
from collections.abc import Iterator

import pytest

from aioengine.rank.garbage import THRESHOLDS, settle_collector


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_exists_is_not_looked_at_again() -> None:
    kept = Node()
    num_before = len(gc.get_objects())
    settle_collector()
    assert gc.get_freeze_count() > 0.9 * num_before
    assert not any(one is kept for one in gc.get_objects())


def test_cycles_that_requests_leave_are_still_found() -> None:
    settle_collector()
    assert gc.isenabled()
    for _ in range(4 * THRESHOLDS[0]):
        Node()  # a cycle that only the collector can free
    num_alive = sum(isinstance(one, Node) for one in gc.get_objects())
    assert num_alive <= THRESHOLDS[0]
