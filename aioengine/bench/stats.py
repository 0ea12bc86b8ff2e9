"""Records of requests -> figures, and the figures of two servers -> ratios. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aioengine.bench.events import Record

MAX_CLIENT_SHARE: Final = 0.7
"""Of a core: a client that uses more may be what limits the figures."""
LATENCIES: Final = {
    "ttft": "time to first token, ms",
    "itl": "inter-token latency, ms",
    "tpot": "time per output token, ms",
    "e2e": "whole request, ms",
}
RATES: Final = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of latencies, in ms."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Distribution | None":
        """None of nothing."""
        ms = np.fromiter(seconds, float) * 1e3
        if not ms.size:
            return None
        median, p90, p99 = (float(value) for value in np.percentile(ms, (50, 90, 99)))
        return cls(float(ms.mean()), median, p90, p99)


@dataclass(frozen=True, slots=True)
class Round:
    """One server under load, once."""

    records: Sequence[Record]
    wall_s: float
    """From the first request sent to the last answer."""
    client_share: float
    """Of a core, that the client used meanwhile."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What one or several rounds came to."""

    rates: Mapping[str, float]
    """By the names in RATES; of several rounds the medians."""
    latencies: Mapping[str, Distribution]
    """By the names in LATENCIES, of the requests of all rounds; those that exist."""
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_short: int
    """Answers that ended before the number of tokens that was asked for."""
    num_events: int
    is_exact: bool
    """Whether the server itself counted tokens."""
    failures: Mapping[str, int]
    """How often, by reason; most frequent first."""
    wall_s: float
    client_share: float
    """The largest of the rounds."""

    @property
    def is_client_limit(self) -> bool:
        return self.client_share > MAX_CLIENT_SHARE


def summarize(rounds: Sequence[Round]) -> Summary:
    records = [record for one in rounds for record in one.records]
    good = [record for record in records if not record.failure]
    samples: dict[str, list[float]] = {
        "ttft": [record.ttft_s for record in good if record.ttft_s is not None],
        "itl": [gap for record in good for gap in record.itl_s],
        "tpot": [record.tpot_s for record in good if record.tpot_s is not None],
        "e2e": [record.e2e_s for record in good],
    }
    distributions = {name: Distribution.of(values) for name, values in samples.items()}
    rates = [_rates(one) for one in rounds]
    return Summary(
        rates={name: statistics.median(rate[name] for rate in rates) for name in RATES},
        latencies={name: found for name, found in distributions.items() if found is not None},
        num_requests=len(records),
        num_prompt_tokens=sum(record.num_prompt_tokens or 0 for record in good),
        num_output_tokens=sum(record.num_output_tokens for record in good),
        num_short=sum(record.num_output_tokens < record.num_asked_tokens for record in good),
        num_events=sum(len(record.token_s) for record in good),
        is_exact=all(record.is_exact for record in good),
        failures=dict(Counter(r.failure for r in records if r.failure).most_common()),
        wall_s=sum(one.wall_s for one in rounds),
        client_share=max(one.client_share for one in rounds),
    )


def _rates(one: Round) -> dict[str, float]:
    good = [record for record in one.records if not record.failure]
    output = sum(record.num_output_tokens for record in good)
    prompt = sum(record.num_prompt_tokens or 0 for record in good)
    return {
        "requests_per_s": len(good) / one.wall_s,
        "output_tokens_per_s": output / one.wall_s,
        "total_tokens_per_s": (prompt + output) / one.wall_s,
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of two servers that took turns."""

    name: str
    first: float
    second: float
    """Medians over the rounds."""
    ratio: float
    """first / second: the median of what each round gave, which noise of the machine moves less
    than either figure."""
    least: float
    most: float


def compare(first: Sequence[Round], second: Sequence[Round]) -> list[Comparison]:
    """Round by round; figures that one of them lacks are left out."""
    ours = [_figures(summarize([one])) for one in first]
    theirs = [_figures(summarize([one])) for one in second]
    rows = []
    for name in ours[0]:
        pairs = [
            (a[name], b[name]) for a, b in zip(ours, theirs, strict=True) if name in a and name in b
        ]
        ratios = [a / b for a, b in pairs if b > 0]
        if len(ratios) == len(ours):
            rows.append(
                Comparison(
                    name,
                    statistics.median(a for a, _ in pairs),
                    statistics.median(b for _, b in pairs),
                    statistics.median(ratios),
                    min(ratios),
                    max(ratios),
                )
            )
    return rows


def _figures(summary: Summary) -> dict[str, float]:
    """Every figure that is compared, by what a person calls it."""
    figures = {RATES[name]: value for name, value in summary.rates.items()}
    for name, found in summary.latencies.items():
        for statistic in ("median", "p99"):
            figures[f"{LATENCIES[name]}, {statistic}"] = getattr(found, statistic)
    return figures
