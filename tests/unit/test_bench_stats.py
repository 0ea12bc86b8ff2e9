"""Records of a load -> figures and ratios."""

import pytest

from aioengine.bench.events import Record
from aioengine.bench.load import Span
from aioengine.bench.stats import Distribution, Round, compare, summarize


def record(*token_s: float, sent_s: float = 0.0, **fields: object) -> Record:
    known: dict[str, object] = {
        "num_asked_tokens": len(token_s),
        "num_output_tokens": len(token_s),
        "num_prompt_tokens": 10,
        "end_s": token_s[-1] if token_s else sent_s + 1,
    }
    return Record(sent_s=sent_s, token_s=token_s, **{**known, **fields})  # type: ignore[arg-type]


def test_what_a_request_took() -> None:
    one = record(1.5, 1.75, 2.5, sent_s=1.0, num_output_tokens=5)
    assert one.ttft_s == 0.5
    assert one.itl_s == [0.25, 0.75]
    assert one.tpot_s == 0.25  # of five tokens in three events
    assert one.e2e_s == 1.5
    whole = record(sent_s=1.0, end_s=4.0, num_output_tokens=5)
    assert (whole.ttft_s, whole.itl_s, whole.tpot_s, whole.e2e_s) == (None, [], None, 3.0)


def test_percentiles() -> None:
    found = Distribution.of([value / 1000 for value in range(101)])
    assert found is not None
    assert (found.mean, found.median) == pytest.approx((50, 50))
    assert (found.p90, found.p99) == pytest.approx((90, 99))
    assert Distribution.of([]) is None
    assert Distribution.of([0.002]) == Distribution(2.0, 2.0, 2.0, 2.0)


def test_a_summary_counts_what_succeeded() -> None:
    short = record(0.5, 1.0, num_asked_tokens=3)
    lost = record(0.1, failure="lost", num_output_tokens=1)
    found = summarize([Round([short, record(1.0, 2.0), lost, lost], 2.0, 0.1)])
    assert found.rates == {
        "requests_per_s": 1.0,
        "output_tokens_per_s": 2.0,
        "total_tokens_per_s": 12.0,
    }
    assert (found.num_requests, found.num_output_tokens, found.num_short) == (4, 4, 1)
    assert found.failures == {"lost": 2}
    assert found.latencies["ttft"].median == pytest.approx(750)
    assert not found.is_client_limit


def test_several_rounds() -> None:
    rounds = [
        Round([record(0.5)], wall_s, share) for wall_s, share in ((1, 0.2), (2, 0.8), (4, 0.1))
    ]
    found = summarize(rounds)
    assert found.rates["requests_per_s"] == 0.5
    assert (found.num_requests, found.wall_s) == (3, 7)
    assert found.is_client_limit


def test_ratios_are_taken_round_by_round() -> None:
    """A neighbour slows the machine down by turns, and both by the same."""
    slow = (1, 2, 8)
    first = [Round([record(0.5 * by)], 1.0 * by, 0.1) for by in slow]
    second = [Round([record(1.0 * by)], 2.0 * by, 0.1) for by in slow]
    rows = {row.name: row for row in compare(first, second)}
    rate = rows["requests/s"]
    assert (rate.first, rate.second) == (0.5, 0.25)
    assert (rate.ratio, rate.least, rate.most) == (2, 2, 2)
    assert rows["time to first token, ms, median"].ratio == pytest.approx(0.5)
    assert "inter-token latency, ms, median" not in rows  # answers of one token


def test_of_a_round_in_which_all_failed_there_is_no_ratio() -> None:
    lost = Round([record(failure="lost", num_output_tokens=0)], 1.0, 0.1)
    good = Round([record(0.5)], 1.0, 0.1)
    assert compare([good, good], [good, lost]) == []


def test_spans() -> None:
    assert Span.parse("--x", "64-256") == Span(64, 256)
    assert str(Span.parse("--x", "7")) == "7"
    assert Span.parse("--x", "0-5", at_least=0) == Span(0, 5)
    for text in ("", "-1", "1-", "5-4", "0", "1.5", "9999999999"):
        with pytest.raises(ValueError, match="--x: expected a number from 1 on"):
            Span.parse("--x", text)
