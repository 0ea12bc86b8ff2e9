"""Who may stay awake while it waits: ranks with a core of their own."""

import pytest

from aioengine.dist.shared_memory import _has_own_core, _Place


@pytest.mark.parametrize(
    ("cores", "num_local_ranks", "expected"),
    [
        ([{0, 1}, {0, 1}], 2, True),
        ([{0, 1}, {0, 1}], 4, False),  # ranks of other groups are here, too
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], 4, True),
        ([{0}, {1}], 2, True),  # pinned apart
        ([{0}, {0}], 2, False),
    ],
)
def test_has_own_core(cores: list[set[int]], num_local_ranks: int, expected: bool) -> None:
    places = [_Place("0", "boot", "pids", 1, b"", frozenset(each)) for each in cores]
    for own in range(len(places)):
        assert _has_own_core(places, own, num_local_ranks) is expected
