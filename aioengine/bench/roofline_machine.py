"""What this machine can do: bytes read per second, and matrix products of a model's shapes.

Figures are the best of several tries: neighbours can only make them worse, and a limit that was
measured too low flatters the engine.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from aioengine.bench.roofline_kernels import read
from aioengine.bench.roofline_work import (
    Limits,
    Linear,
    Model,
    head_linear,
    layer_linears,
)
from aioengine.model_config import ModelConfig

MEMORY_BYTES: Final = 1 << 30
"""More than any cache holds."""
DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
}
USUAL_DTYPES: Final = ("bfloat16", "float32")
ROWS: Final = (1, 8, 32, 128, 2048)
MAX_WEIGHT_BYTES: Final = 512 << 20
"""Of the matrices that products go through by turns: few rows read memory then, as in a model."""
MAX_PASS_FLOPS: Final = 100_000_000_000
HEAD_ROWS: Final = 32
"""Up to as many rows go through the head as well: a prefill asks it for its last token only."""
SECONDS_PER_TRY: Final = 0.1
NUM_TRIES: Final = 4


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of reading `num_bytes` again and again."""

    num_bytes: int
    num_threads: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """Of `rows` rows through the model's linear layers."""

    dtype: str
    rows: int
    flops_per_s: float
    weight_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    bandwidths: tuple[Bandwidth, ...]
    matmuls: tuple[MatmulRate, ...]

    def limits(self, model: Model, num_threads: int) -> Limits:
        """Memory speed is that of reading what is as large as the weights: a cache that helps to
        read them again and again helps the engine, too. A product that read its weights quicker
        met a better moment, so it counts; so do products in float32 of a model in half a type,
        where the library is quicker with those."""
        size = min(model.read_bytes, MEMORY_BYTES)
        reads = [b for b in self.bandwidths if (b.num_bytes, b.num_threads) == (size, num_threads)]
        wide_enough = [m for m in self.matmuls if m.dtype == model.dtype or m.dtype == "float32"]
        return Limits(
            bytes_per_s=max(
                *(read.bytes_per_s for read in reads),
                *(product.weight_bytes_per_s for product in self.matmuls),
            ),
            flops_per_s=max(product.flops_per_s for product in wide_enough),
        )

    def best_with(self, other: "Machine") -> "Machine":
        """Of two measurements of the same."""
        bandwidths = tuple(
            replace(a, bytes_per_s=max(a.bytes_per_s, b.bytes_per_s))
            for a, b in zip(self.bandwidths, other.bandwidths, strict=True)
        )
        pairs = zip(self.matmuls, other.matmuls, strict=True)
        return Machine(bandwidths, tuple(max(p, key=lambda m: m.flops_per_s) for p in pairs))


def measure_machine(
    cfg: ModelConfig,
    sizes: Iterable[int],
    num_threads: int,
    dtypes: Sequence[str] = USUAL_DTYPES,
    rows: Sequence[int] = ROWS,
) -> Machine:
    """`sizes` are the bytes to read, MEMORY_BYTES at most; `num_threads` must be torch's, too."""
    sizes = sorted({min(size, MEMORY_BYTES) for size in sizes})
    counts = sorted({1, num_threads})
    bandwidths = tuple(
        Bandwidth(size, count, measure_bandwidth(size, count)) for size in sizes for count in counts
    )
    return Machine(bandwidths, tuple(m for d in dtypes for m in measure_matmuls(cfg, d, rows)))


def measure_bandwidth(num_bytes: int, num_threads: int) -> float:
    """Bytes/s of all threads together, each in its own part."""
    part_words = max(1, num_bytes // 8 // num_threads // 4) * 4
    words = np.ones(part_words * num_threads, np.uint64)
    parts = np.split(words, num_threads)
    began_s = time.perf_counter()
    for part in parts:  # touched, compiled, in the cache if it fits
        read(part)
    once_s = (time.perf_counter() - began_s) / num_threads
    num_passes = max(1, round(SECONDS_PER_TRY / max(once_s, 1e-6)))
    return max(words.nbytes * num_passes / _read_s(parts, num_passes) for _ in range(NUM_TRIES))


def _read_s(parts: Sequence[np.ndarray], num_passes: int) -> float:
    """From the moment when all threads are there to the end of the last."""
    gate = threading.Barrier(len(parts) + 1)

    def work(part: np.ndarray) -> None:
        gate.wait()
        for _ in range(num_passes):
            read(part)

    threads = [threading.Thread(target=work, args=(part,), name="reader") for part in parts]
    for thread in threads:
        thread.start()
    gate.wait()
    began_s = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began_s


@torch.inference_mode()
def measure_matmuls(cfg: ModelConfig, dtype_name: str, rows: Sequence[int]) -> list[MatmulRate]:
    """Through torch, as a model without kernels of its own computes."""
    dtype = DTYPES[dtype_name]
    linears = layer_linears(cfg)
    layer_bytes = sum(linear.num_weights for linear in linears) * dtype.itemsize
    num_layers = max(1, min(cfg.num_layers, MAX_WEIGHT_BYTES // layer_bytes))
    layers = [_weights(linears, dtype) for _ in range(num_layers)]
    head = _weights([head_linear(cfg)], dtype)
    rates = []
    for count in rows:
        per_layer = 2 * count * layer_bytes // dtype.itemsize
        used = layers[: max(1, MAX_PASS_FLOPS // per_layer)]
        weights = list(itertools.chain.from_iterable(used)) + (head if count <= HEAD_ROWS else [])
        inputs = {w.shape[1]: torch.randn(count, w.shape[1]).to(dtype) for w in weights}

        seconds = _best_s(functools.partial(_multiply, weights, inputs))
        num_weights = sum(weight.numel() for weight in weights)
        rates.append(
            MatmulRate(
                dtype_name,
                count,
                2 * count * num_weights / seconds,
                num_weights * dtype.itemsize / seconds,
            )
        )
    return rates


def _multiply(weights: Sequence[torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
    for weight in weights:
        functional.linear(inputs[weight.shape[1]], weight)


def _weights(linears: Iterable[Linear], dtype: torch.dtype) -> list[torch.Tensor]:
    """Random: some processors are quicker with zeros."""
    return [
        torch.empty(linear.out_features, linear.in_features, dtype=dtype).uniform_(-1, 1)
        for linear in linears
    ]


def _best_s(work: Callable[[], None]) -> float:
    work()
    best, deadline = float("inf"), time.perf_counter() + NUM_TRIES * SECONDS_PER_TRY
    for number in itertools.count():
        if number >= NUM_TRIES and time.perf_counter() > deadline:
            break
        began_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began_s)
    return best
