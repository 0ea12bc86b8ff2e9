"""What recent answers say about the next one."""

import pytest

from aioengine.frontend.pace import Pace


def test_nothing_is_known_before_a_second_token() -> None:
    pace = Pace()
    assert pace.expected_s(10) is None
    pace.first_token(0.5)
    assert pace.expected_s(10) is None
    pace.next_tokens(4, 0.4)
    assert pace.expected_s(1) == pytest.approx(0.5)
    assert pace.expected_s(11) == pytest.approx(0.5 + 10 * 0.1)


def test_recent_figures_count_most() -> None:
    pace = Pace()
    pace.first_token(1.0)
    for _ in range(200):
        pace.next_tokens(1, 0.5)
    for _ in range(200):
        pace.next_tokens(1, 0.1)
    assert pace.expected_s(101) == pytest.approx(1.0 + 100 * 0.1, rel=0.01)
