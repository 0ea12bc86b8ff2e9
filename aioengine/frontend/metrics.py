"""Prometheus metrics under vLLM's names with the prefix `aioengine:`; label engine = dp rank.

Figures are plain numbers until somebody asks: prometheus_client's own counters take a lock and a
microsecond or two each, and there are three for every token. No label comes from a client, so the
series are the same from the start to the end.

A choice is a request here, as it is for vLLM: n of them have one prompt.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Final, get_args

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.utils import floatToGoString

from aioengine.frontend.pace import Pace
from aioengine.frontend.states import Health, ReplicaState
from aioengine.messages import FinishReason, LoadStats

PREFIX: Final = "aioengine:"
TOKEN_BUCKETS_S: Final = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0,
)  # fmt: skip
"""From token to token: tiny models take less than a millisecond, a preempted request minutes. Close
together where readers notice and limits are set, between 5 and 200 ms."""
WAIT_BUCKETS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0,
    10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""To the first token and its parts: one short step to a long queue. Close together between 0.2 and
5 s, where limits are set."""
ANSWER_BUCKETS_S: Final = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
    120.0, 300.0, 600.0, 1200.0, 3600.0,
)  # fmt: skip
"""Whole answers: a few tokens of a tiny model to an hour of reasoning."""
LENGTH_BUCKETS: Final = (1.0, 4.0, *(float(2**n) for n in range(4, 21)))
"""Tokens: doubling, as attention's and the KV cache's cost does, up to the longest contexts."""


class Tally:
    """How many values fell into which bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """A value belongs to the first bucket whose upper bound is not below it."""
        self._bounds = bounds
        self._names = (*map(floatToGoString, bounds), "+Inf")
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, label: str) -> None:
        buckets = list(zip(self._names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([label], buckets, self._sum)


class Metrics:
    """The figures of one replica."""

    def __init__(self, pace: Pace) -> None:
        self.stats = LoadStats()
        """As its leader said last."""
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.ttft = Tally(WAIT_BUCKETS_S)
        self.queue = Tally(WAIT_BUCKETS_S)
        self.prefill = Tally(WAIT_BUCKETS_S)
        self.inter_token = Tally(TOKEN_BUCKETS_S)
        self.per_output_token = Tally(TOKEN_BUCKETS_S)
        self.decode = Tally(ANSWER_BUCKETS_S)
        self.e2e = Tally(ANSWER_BUCKETS_S)
        self.prompt_lengths = Tally(LENGTH_BUCKETS)
        self.output_lengths = Tally(LENGTH_BUCKETS)
        self._pace = pace
        self._gaps: dict[float, int] = {}
        """Tokens of the step at hand, by the time since their predecessors."""

    @property
    def kv_cache_usage(self) -> float:
        used = self.stats.num_blocks - self.stats.num_free_blocks
        return used / self.stats.num_blocks if self.stats.num_blocks else 0.0

    def accepted(self, num_prompt_tokens: int) -> None:
        """Once for a prompt, however many choices share it: as `usage` counts."""
        self.num_prompt_tokens += num_prompt_tokens
        self.prompt_lengths.observe(num_prompt_tokens)

    def admitted(self, after_s: float) -> None:
        self.queue.observe(after_s)

    def first_tokens(self, num_tokens: int, after_s: float, prefill_s: float) -> None:
        self.num_generated_tokens += num_tokens
        self.ttft.observe(after_s)
        self.prefill.observe(prefill_s)
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

    def finished(
        self, reason: FinishReason, after_s: float, num_tokens: int, decode_s: float
    ) -> None:
        """`decode_s`: from the first to the last of its tokens."""
        self.num_finished[reason] += 1
        self.e2e.observe(after_s)
        self.output_lengths.observe(num_tokens)
        if num_tokens:
            self.decode.observe(decode_s)
        if num_tokens > 1:
            self.per_output_token.observe(decode_s / (num_tokens - 1))


GAUGES: Final[tuple[tuple[str, str, Callable[[Metrics], float]], ...]] = (
    (
        "num_requests_running",
        "Requests of all front ends that have a slot.",
        lambda m: m.stats.num_running,
    ),
    (
        "num_requests_waiting",
        "Requests of all front ends that wait for a slot, preempted ones included.",
        lambda m: m.stats.num_waiting,
    ),
    (
        "kv_cache_usage_perc",
        "Part of the KV blocks that requests hold, 0 to 1.",
        lambda m: m.kv_cache_usage,
    ),
)
COUNTERS: Final[tuple[tuple[str, str, Callable[[Metrics], float]], ...]] = (
    (
        "num_preemptions",
        "Requests of all front ends that lost their slot and wait again.",
        lambda m: m.stats.num_preemptions,
    ),
    (
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache, for all front ends.",
        lambda m: m.stats.prefix_cache_queries,
    ),
    (
        "prefix_cache_hits",
        "Tokens found in the prefix cache, for all front ends.",
        lambda m: m.stats.prefix_cache_hits,
    ),
    (
        "prompt_tokens",
        "Prompt tokens of accepted requests; choices of one prompt count it once.",
        lambda m: m.num_prompt_tokens,
    ),
    (
        "generation_tokens",
        "Tokens that answers consist of, those of unfinished ones included.",
        lambda m: m.num_generated_tokens,
    ),
)
HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Metrics], Tally]], ...]] = (
    (
        "time_to_first_token_seconds",
        "From a request's acceptance, with its prompt tokenized, to its first token.",
        lambda m: m.ttft,
    ),
    (
        "inter_token_latency_seconds",
        "From token to token; those of one step share the time since the step before.",
        lambda m: m.inter_token,
    ),
    (
        "e2e_request_latency_seconds",
        "From a request's acceptance to its end, for whatever reason it ends.",
        lambda m: m.e2e,
    ),
    (
        "request_queue_time_seconds",
        "From a request's acceptance to its first slot.",
        lambda m: m.queue,
    ),
    (
        "request_prefill_time_seconds",
        "From a request's first slot to its first token.",
        lambda m: m.prefill,
    ),
    (
        "request_decode_time_seconds",
        "From a request's first token to its last, when it has ended.",
        lambda m: m.decode,
    ),
    (
        "request_time_per_output_token_seconds",
        "Mean time from token to token within a request that has ended.",
        lambda m: m.per_output_token,
    ),
    (
        "request_prompt_tokens",
        "Length of prompts; choices of one prompt count it once.",
        lambda m: m.prompt_lengths,
    ),
    (
        "request_generation_tokens",
        "Length of answers that have ended, for whatever reason.",
        lambda m: m.output_lengths,
    ),
)


class EngineMetrics:
    """The figures of every replica that a front end knows: a collector for a registry.

    Of its own requests, but for what leaders tell every front end: gauges, preemptions, prefix
    cache and states.
    """

    def __init__(
        self,
        num_replicas: int,
        read_health: Callable[[], Health],
        read_states: Callable[[], Sequence[ReplicaState]],
        restart_count: int = 0,
    ) -> None:
        self.pace = Pace()
        self.by_replica = [Metrics(self.pace) for _ in range(num_replicas)]
        self._read_health = read_health
        self._read_states = read_states
        self._restart_count = restart_count

    def collect(self) -> Iterator[Metric]:
        """What a registry asks for."""
        replicas = [(str(rank), metrics) for rank, metrics in enumerate(self.by_replica)]
        yield from self._launch()
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
            "Requests ended, by reason; abort: the client left; error: the engine failed them.",
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

    def _launch(self) -> Iterator[Metric]:
        """What has no engine, and what replicas are."""
        build = GaugeMetricFamily(f"{PREFIX}build_info", "Always 1.", labels=["version"])
        build.add_metric([version("aioengine")], 1)
        yield build
        yield GaugeMetricFamily(
            f"{PREFIX}restart_count", "Times the launcher started again.", self._restart_count
        )
        health = GaugeMetricFamily(
            f"{PREFIX}health", "1 for what /health says, 0 for the others.", labels=["state"]
        )
        for name in get_args(Health):
            health.add_metric([name], name == self._read_health())
        yield health
        states = GaugeMetricFamily(
            f"{PREFIX}replica_state",
            "1 for what a replica is, 0 for the others.",
            labels=["engine", "state"],
        )
        for rank, state in enumerate(self._read_states()):
            for name in get_args(ReplicaState):
                states.add_metric([str(rank), name], name == state)
        yield states
