"""The offset of another clock is never further away than its error says."""

from hypothesis import given
from hypothesis import strategies as st

from aioengine.timeline.clock import ClockOffset, estimate, own_clock

NS = st.integers(0, 10**9)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(NS, NS, NS), min_size=1))
def test_the_true_offset_lies_within_the_error(
    offset_ns: int, trips: list[tuple[int, int, int]]
) -> None:
    """However long the question and the answer took on their ways."""
    measured = [
        (asked_ns, asked_ns + there_ns - offset_ns, asked_ns + there_ns + back_ns)
        for asked_ns, there_ns, back_ns in trips
    ]
    found = estimate(measured)
    assert abs(found.offset_ns - offset_ns) <= found.error_ns
    assert found.error_ns <= min(there_ns + back_ns for _, there_ns, back_ns in trips) // 2 + 1


def test_the_quickest_trip_counts() -> None:
    assert estimate([(0, 5000, 100), (200, 5255, 210), (300, 6000, 400)]) == ClockOffset(-5050, 6)


def test_this_process_names_one_clock() -> None:
    assert own_clock() == own_clock() != " "
