"""Prometheus metrics under vLLM's names with the prefix `aioengine:`; label engine = dp rank.

Figures are plain numbers until somebody asks: prometheus_client's own counters take a lock and a
microsecond or two each, and there are three for every token.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.utils import floatToGoString

from aioengine.frontend.pace import Pace
from aioengine.messages import LoadStats

PREFIX: Final = "aioengine:"
FINISH_REASONS: Final = ("stop", "length", "abort", "error")
LATENCY_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
LONG_BUCKETS_S: Final = (*LATENCY_BUCKETS_S[4:], 120.0, 300.0, 600.0)


class Tally:
    """How many values fell into which bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """A value belongs to the first bucket whose upper bound is not below it."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, label: str) -> None:
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([label], buckets, self._sum)


class Metrics:
    """The figures of one replica."""

    def __init__(self, pace: Pace) -> None:
        self.stats = LoadStats()
        """As its leader said last."""
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.ttft = Tally(LATENCY_BUCKETS_S)
        self.inter_token = Tally(LATENCY_BUCKETS_S)
        self.e2e = Tally(LONG_BUCKETS_S)
        self._pace = pace
        self._gaps: dict[float, int] = {}
        """Tokens of the step at hand, by the time since their predecessors."""

    @property
    def kv_cache_usage(self) -> float:
        used = self.stats.num_blocks - self.stats.num_free_blocks
        return used / self.stats.num_blocks if self.stats.num_blocks else 0.0

    def accepted(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens

    def first_tokens(self, num_tokens: int, after_s: float) -> None:
        self.num_generated_tokens += num_tokens
        self.ttft.observe(after_s)
        self._pace.first_token(after_s)

    def next_tokens(self, num_tokens: int, after_s: float) -> None:
        """Counts with the others of the step, for many of them waited for the same one: until
        `end_step`."""
        gap_s = after_s / num_tokens
        self._gaps[gap_s] = self._gaps.get(gap_s, 0) + num_tokens

    def end_step(self) -> None:
        for gap_s, num_tokens in self._gaps.items():
            self.num_generated_tokens += num_tokens
            self.inter_token.observe(gap_s, num_tokens)
            self._pace.next_tokens(1, gap_s)
        self._gaps.clear()

    def finished(self, reason: str, after_s: float) -> None:
        self.num_finished[reason] += 1
        self.e2e.observe(after_s)


GAUGES: Final[tuple[tuple[str, str, Callable[[Metrics], float]], ...]] = (
    ("num_requests_running", "Requests in the running set.", lambda m: m.stats.num_running),
    ("num_requests_waiting", "Requests that wait to be run.", lambda m: m.stats.num_waiting),
    ("kv_cache_usage_perc", "Part of KV blocks in use, 0 to 1.", lambda m: m.kv_cache_usage),
)
COUNTERS: Final[tuple[tuple[str, str, Callable[[Metrics], float]], ...]] = (
    ("num_preemptions", "Requests preempted.", lambda m: m.stats.num_preemptions),
    (
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda m: m.stats.prefix_cache_queries,
    ),
    (
        "prefix_cache_hits",
        "Tokens found in the prefix cache.",
        lambda m: m.stats.prefix_cache_hits,
    ),
    ("prompt_tokens", "Prompt tokens of accepted requests.", lambda m: m.num_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda m: m.num_generated_tokens),
)
HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Metrics], Tally]], ...]] = (
    ("time_to_first_token_seconds", "Arrival to first token.", lambda m: m.ttft),
    ("inter_token_latency_seconds", "Time between tokens.", lambda m: m.inter_token),
    ("e2e_request_latency_seconds", "Arrival to last token.", lambda m: m.e2e),
)


class EngineMetrics:
    """The figures of every replica that a front end knows. Own registry: no process globals."""

    def __init__(self, num_replicas: int, restart_count: int = 0) -> None:
        self.pace = Pace()
        self.by_replica = [Metrics(self.pace) for _ in range(num_replicas)]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._restart_count = restart_count

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for. Every series exists from the start."""
        replicas = [(str(rank), metrics) for rank, metrics in enumerate(self.by_replica)]
        yield GaugeMetricFamily(  # of the launch: it has no engine
            f"{PREFIX}restart_count", "Times the launcher started again.", self._restart_count
        )
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["engine"])
            for label, metrics in replicas:
                gauge.add_metric([label], read(metrics))
            yield gauge
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["engine"])
            for label, metrics in replicas:
                counter.add_metric([label], read(metrics))
            yield counter
        success = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Requests ended, by reason.",
            labels=["engine", "finished_reason"],
        )
        for label, metrics in replicas:
            for reason, count in metrics.num_finished.items():
                success.add_metric([label, reason], count)
        yield success
        for name, text, read_tally in HISTOGRAMS:
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=["engine"])
            for label, metrics in replicas:
                read_tally(metrics).add_to(histogram, label)
            yield histogram
