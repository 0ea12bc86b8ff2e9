"""Draws what `aioengine bench serve` measured. Needs matplotlib, the extra [bench].

Imported only when a plot is asked for.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aioengine.bench.stats import Round

NUM_STEPS: Final = 60
"""Of the timeline."""


def plot(names: Sequence[str], rounds: Sequence[Sequence[Round]], path: str) -> None:
    """Three pictures side by side: both latencies as shares of requests, tokens over time."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    first, gaps, timeline = figure.subplots(1, 3)
    for name, each in zip(names, rounds, strict=True):
        good = [record for one in each for record in one.records if not record.failure]
        _shares(first, (r.ttft_s for r in good if r.ttft_s is not None), name)
        _shares(gaps, (gap for record in good for gap in record.itl_s), name)
        _tokens_over_time(timeline, each[-1], name)
    _label(first, "time to first token", "ms", "share of requests")
    _label(gaps, "inter-token latency", "ms", "share of gaps")
    _label(timeline, "output, last round", "seconds", "tokens/s")
    figure.savefig(path)


def _shares(axes: Axes, seconds: Iterable[float], name: str) -> None:
    """How large a share is at most so late."""
    ms = np.fromiter(seconds, float) * 1e3
    if ms.size:
        axes.ecdf(ms, label=name)


def _tokens_over_time(axes: Axes, one: Round, name: str) -> None:
    """Every event stands for its request's tokens per event; an answer in one piece for all."""
    good = [record for record in one.records if not record.failure]
    if not good:
        return
    times = [record.token_s or [record.end_s] for record in good]
    weights = [
        np.full(len(each), record.num_output_tokens / len(each))
        for each, record in zip(times, good, strict=True)
    ]
    began_s = min(record.sent_s for record in good)
    seconds = np.concatenate([np.asarray(each) for each in times]) - began_s
    tokens, edges = np.histogram(seconds, bins=NUM_STEPS, weights=np.concatenate(weights))
    axes.stairs(tokens / (edges[1] - edges[0]), edges, label=name)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
