"""Prometheus metrics under vLLM's names with the prefix `aioengine:`; label engine = dp rank."""

from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from aioengine.frontend.pace import Pace
from aioengine.messages import LoadStats

FINISH_REASONS: Final = ("stop", "length", "abort", "error")
LATENCY_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
LONG_BUCKETS_S: Final = (*LATENCY_BUCKETS_S[4:], 120.0, 300.0, 600.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # "_created" series double the page


class EngineMetrics:
    """The figures of every replica that a front end knows. Own registry: no process globals."""

    def __init__(self, num_replicas: int) -> None:
        self.registry = CollectorRegistry()
        self.pace = Pace()
        self._running = self._gauge("num_requests_running", "Requests in the running set.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be run.")
        self._usage = self._gauge("kv_cache_usage_perc", "Part of KV blocks in use, 0 to 1.")
        self._preemptions = self._counter("num_preemptions", "Requests preempted.")
        self._queries = self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.success = Counter(
            "aioengine:request_success",
            "Requests ended, by reason.",
            ["engine", "finished_reason"],
            registry=self.registry,
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between tokens.", LATENCY_BUCKETS_S
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", LONG_BUCKETS_S
        )
        self._last: dict[int, LoadStats] = {rank: LoadStats() for rank in range(num_replicas)}
        self.by_replica = [Metrics(self, rank) for rank in range(num_replicas)]

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def update(self, dp_rank: int, stats: LoadStats) -> None:
        """Take a replica's gauges and the growth of its counters."""
        last, label = self._last[dp_rank], str(dp_rank)
        self._last[dp_rank] = stats
        self._running.labels(label).set(stats.num_running)
        self._waiting.labels(label).set(stats.num_waiting)
        used = stats.num_blocks - stats.num_free_blocks
        self._usage.labels(label).set(used / stats.num_blocks if stats.num_blocks else 0.0)
        self._preemptions.labels(label).inc(stats.num_preemptions - last.num_preemptions)
        self._queries.labels(label).inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        self._hits.labels(label).inc(stats.prefix_cache_hits - last.prefix_cache_hits)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"aioengine:{name}", text, ["engine"], registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"aioengine:{name}", text, ["engine"], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"aioengine:{name}", text, ["engine"], buckets=buckets, registry=self.registry
        )


class Metrics:
    """One replica's share, with its labels bound; used by the choices that run there."""

    def __init__(self, engine: EngineMetrics, dp_rank: int) -> None:
        label = str(dp_rank)
        self._pace = engine.pace
        self._ttft = engine.ttft.labels(label)
        self._inter_token = engine.inter_token.labels(label)
        self._e2e = engine.e2e.labels(label)
        self._generation_tokens = engine.generation_tokens.labels(label)
        self._prompt_tokens = engine.prompt_tokens.labels(label)
        self._success = {reason: engine.success.labels(label, reason) for reason in FINISH_REASONS}
        engine.update(dp_rank, LoadStats())  # every series exists from the start

    def accepted(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)
        self._pace.first_token(after_s)

    def next_tokens(self, num_tokens: int, after_s: float) -> None:
        self._pace.next_tokens(num_tokens, after_s)
        for _ in range(num_tokens):
            self._inter_token.observe(after_s / num_tokens)

    def generated(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def finished(self, reason: str, after_s: float) -> None:
        self._success[reason].inc()
        self._e2e.observe(after_s)
