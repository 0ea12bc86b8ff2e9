"""Draws from truncated distributions, row by row, on CPU: without a sort of the vocabulary, and
without tables of rows × vocabulary.

A weight is a token's probability over that of the best one, in [0, 1]. The bits of such a float32
grow with it, so the least weight that top_k or top_p keep is found ten bits at a time, in
histograms of counts or of mass.

Shapes: R rows · N of them that draw · V vocabulary.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from aioengine.kernels.codegen import entry, inlined

_LOG2_E: Final = np.float32(1.4426950408889634)
_NUM_BINS: Final = 1024
_RUN: Final = 64
"""Tokens whose weights are added up on their own: few sums have to be walked to find a token."""
_FLUSHED: Final = np.float32(-126)
"""Weights below two to this are 0: the last that is a normal float32."""

_contracted: Final = njit(
    no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy", fastmath={"contract"}
)
"""Like `inlined`, with products and sums fused where the processor can."""


@entry
def draw(
    logits_RV: Any,
    rows_N: Any,
    temperature_N: Any,
    top_k_N: Any,
    top_p_N: Any,
    min_p_N: Any,
    seeds_N: Any,
    positions_N: Any,
    choices_N: Any,
    ids_R: Any,
) -> None:
    """Replaces the best ids of the rows `rows_N`, in `ids_R`, by drawn ones.

    float32 logits [R, V], temperatures and min_p; float64 top_p; uint64 seeds; the others int64
    (top_k 0: off). A row whose best logit is not finite gets some valid id.
    """
    weights_V = np.empty(logits_RV.shape[1], np.float32)
    powers_V = np.empty(logits_RV.shape[1], np.int32)
    for n in range(len(rows_N)):
        row = rows_N[n]
        _weigh(logits_RV[row], logits_RV[row, ids_R[row]], temperature_N[n], weights_V, powers_V)
        least = min_p_N[n]
        if 0 < top_k_N[n] < len(weights_V):
            least = max(least, _least_kept(weights_V, least, True, float(top_k_N[n])))
        if top_p_N[n] < 1:
            target = top_p_N[n] * _run_sums(weights_V, least)[1]
            least = max(least, _least_kept(weights_V, least, False, target))
        ids_R[row] = _invert(weights_V, least, uniform(seeds_N[n], positions_N[n], choices_N[n]))


@_contracted
def _weigh(logits_V: Any, best: Any, temperature: Any, weights_V: Any, powers_V: Any) -> None:
    """exp((logit - best) / temperature), as 2^n · 2^f with f in [-1/2, 1/2]; the series of 2^f
    ends with f^6: within 2e-7. Both loops are vectorised by LLVM."""
    scale = _LOG2_E / temperature
    for i in range(len(logits_V)):
        t = (logits_V[i] - best) * scale
        inside = t if t > _FLUSHED else _FLUSHED  # where t is NaN, too
        n = np.floor(inside + np.float32(0.5))
        f = inside - n
        series = np.float32(0.00015403530393381608)
        series = series * f + np.float32(0.0013333558146428443)
        series = series * f + np.float32(0.009618129107628477)
        series = series * f + np.float32(0.05550410866482158)
        series = series * f + np.float32(0.2402265069591007)
        series = series * f + np.float32(0.6931471805599453)
        series = series * f + np.float32(1)
        weights_V[i] = series if t > _FLUSHED else np.float32(0)
        powers_V[i] = np.int32(np.int32(n) + np.int32(127)) << np.int32(23)
    as_floats_V = powers_V.view(np.float32)
    for i in range(len(logits_V)):
        weights_V[i] *= as_floats_V[i]


@inlined
def _least_kept(weights_V: Any, least: Any, by_count: Any, target: Any) -> Any:
    """The greatest weight such that those from it on reach a count, or a mass; of weights that are
    `least` or more."""
    bits_V = weights_V.view(np.int32)
    amounts = np.empty(_NUM_BINS, np.float64)
    prefix, above = 0, 0.0
    for shift in (20, 10, 0):
        amounts[:] = 0
        for i in range(len(weights_V)):
            if bits_V[i] >> (shift + 10) == prefix and weights_V[i] >= least:
                place = (bits_V[i] >> shift) & (_NUM_BINS - 1)
                amounts[place] += 1.0 if by_count else np.float64(weights_V[i])
        chosen = 0
        for place in range(_NUM_BINS - 1, -1, -1):
            if amounts[place] > 0:
                chosen = place
                if above + amounts[place] >= target:
                    break
                above += amounts[place]
        else:
            above -= amounts[chosen]  # rounding: the target is past the last one
        prefix = prefix << 10 | chosen
    found = np.empty(1, np.int32)
    found[0] = prefix
    return found.view(np.float32)[0]


@inlined
def _run_sums(weights_V: Any, least: Any) -> Any:
    """What is kept of each run of tokens, and of all together."""
    sums = np.empty(-(-len(weights_V) // _RUN), np.float64)
    total = 0.0
    for run in range(len(sums)):
        kept = 0.0
        for i in range(run * _RUN, min((run + 1) * _RUN, len(weights_V))):
            if weights_V[i] >= least:
                kept += weights_V[i]
        sums[run] = kept
        total += kept
    return sums, total


@inlined
def _invert(weights_V: Any, least: Any, uniform: Any) -> Any:
    """The first token, in vocabulary order, whose cumulated share exceeds the uniform."""
    sums, total = _run_sums(weights_V, least)
    target = uniform * total
    before, last = 0.0, 0
    for run in range(len(sums)):
        if before + sums[run] > target:
            for i in range(run * _RUN, min((run + 1) * _RUN, len(weights_V))):
                if weights_V[i] >= least and weights_V[i] > 0:
                    last = i
                    before += weights_V[i]
                    if before > target:
                        return i
        else:
            before += sums[run]
    return last


@inlined
def uniform(seed: Any, position: Any, choice: Any) -> Any:
    """As `worker/philox.py` has it, for one row: Philox4x32-10."""
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1 = np.uint64(position) & low, np.uint64(choice) & low
    x2, x3 = np.uint64(0), np.uint64(0)
    key0, key1 = seed & low, seed >> word
    for _ in range(10):
        product0 = x0 * np.uint64(0xD2511F53)
        product1 = x2 * np.uint64(0xCD9E8D57)
        x0 = (product1 >> word) ^ x1 ^ key0
        x1 = product1 & low
        x2 = (product0 >> word) ^ x3 ^ key1
        x3 = product0 & low
        key0 = (key0 + np.uint64(0x9E3779B9)) & low
        key1 = (key1 + np.uint64(0xBB67AE85)) & low
    bits = ((x0 >> np.uint64(5)) << np.uint64(26)) | (x1 >> np.uint64(6))
    return np.float64(bits) * 2.0**-53
