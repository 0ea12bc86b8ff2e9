"""From logits to token ids and log probabilities, vectorised over the rows of a step.

Nothing here raises because of what a request asked for or a model computed: a row whose logits are
unusable is reported as such and disturbs no other row.

Shapes: R rows that sample · N rows that draw · M rows that truncate · V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.messages import Sampled, SlotParams, TokenLogprobs
from aioengine.worker.logprobs import describe_tokens
from aioengine.worker.philox import uniforms

MIN_TEMPERATURE: Final = 1e-5
"""Below it a row is greedy."""
NO_LOGPROBS: Final = -1
FIRST_SORTED: Final = 1024
"""Most probable tokens looked at first when only top_p limits a row."""

ROW_PARAMS: Final = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("choice", np.int64),
        ("num_logprobs", np.int64),
    ]
)
"""SlotParams as one row of a numpy table."""


def row_params(params: SlotParams) -> tuple[float, ...]:
    """In the order of ROW_PARAMS."""
    num_logprobs = NO_LOGPROBS if params.logprobs is None else params.logprobs
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.choice_index,
        num_logprobs,
    )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one step that draw a token. Host memory."""

    slots: NDArray[np.int64]
    epochs: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Of the token to be drawn."""
    params: NDArray[np.void]
    """ROW_PARAMS records."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What `Sampler.draw` chose, on the device."""

    ids_R: Tensor
    """int64; a row that is not usable holds some valid id."""
    usable_R: Tensor
    """False where the logits drawn from had NaN or +inf, or nothing but -inf."""


class Sampler:
    """Stateless: a draw depends on the row's logits, parameters and position."""

    def __init__(self, logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]) -> None:
        self._processed_logprobs = logprobs_mode == "processed_logprobs"

    def draw(self, logits_RV: Tensor, batch: SamplingBatch) -> Draws:
        """One id for each row of float32 logits, in which the requests' rules are applied."""
        best_R, ids_R = logits_RV.max(dim=1)  # NaN wins
        drawing = np.flatnonzero(batch.params["temperature"] >= MIN_TEMPERATURE)
        if len(drawing):
            rows_N = _to(logits_RV, drawing)
            params = batch.params[drawing]
            scaled_NV = logits_RV.index_select(0, rows_N) - best_R.index_select(0, rows_N)[:, None]
            scaled_NV /= _to(logits_RV, params["temperature"])[:, None]
            uniforms_N = uniforms(params["seed"], batch.positions[drawing], params["choice"])
            probs_NV = _truncate(scaled_NV.softmax(dim=1), params)
            ids_R.index_copy_(0, rows_N, _invert_cdf(probs_NV, _to(logits_RV, uniforms_N)))
        return Draws(ids_R, best_R.isfinite())

    def report(
        self, logits_RV: Tensor, processed_RV: Tensor, draws: Draws, batch: SamplingBatch
    ) -> tuple[Sampled, ...]:
        """What the leader gets, in the order of the rows.

        From the model's logits, and from those drawn from: the same tensor where they are equal.
        """
        reported_RV = processed_RV if self._processed_logprobs else logits_RV
        logprobs = self._logprobs(reported_RV, draws.ids_R, batch.params)
        ids, usable = draws.ids_R.tolist(), draws.usable_R.tolist()
        return tuple(
            Sampled(slot, epoch, (token_id,), logprobs.get(row, ()))
            if ok
            else Sampled(slot, epoch, (), error=_blame(logits_RV[row]))
            for row, (slot, epoch, token_id, ok) in enumerate(
                zip(batch.slots.tolist(), batch.epochs.tolist(), ids, usable, strict=True)
            )
        )

    def _logprobs(
        self, logits_RV: Tensor, ids_R: Tensor, params: NDArray[np.void]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By row, for the rows that asked."""
        asking = np.flatnonzero(params["num_logprobs"] > NO_LOGPROBS)
        if not len(asking):
            return {}
        rows_N = _to(logits_RV, asking)
        chosen_NV = logits_RV.index_select(0, rows_N)
        if self._processed_logprobs:
            temperature = params["temperature"][asking]
            divisor = np.where(temperature < MIN_TEMPERATURE, 1, temperature)
            chosen_NV /= _to(logits_RV, divisor)[:, None]
        described = describe_tokens(
            chosen_NV.log_softmax(dim=1),
            ids_R.index_select(0, rows_N),
            params["num_logprobs"][asking].tolist(),
        )
        return {row: (one,) for row, one in zip(asking.tolist(), described, strict=True)}


def _blame(logits_V: Tensor) -> str:
    """Why a row is not usable, from the model's own logits."""
    if logits_V.max().isfinite():
        return "the request's logit_bias, min_tokens and penalties leave no token to draw"
    return "the model's logits for this request are not finite"


def _truncate(probs_NV: Tensor, params: NDArray[np.void]) -> Tensor:
    """Zeroes what top_k, min_p and then top_p (of what is left) exclude; not renormalised."""
    top_k = np.where(params["top_k"] > 0, params["top_k"], probs_NV.shape[1])
    truncating = np.flatnonzero(
        (top_k < probs_NV.shape[1]) | (params["top_p"] < 1) | (params["min_p"] > 0)
    )
    if not len(truncating):
        return probs_NV
    rows_M = _to(probs_NV, truncating)
    least_M = _least_kept(
        probs_NV.index_select(0, rows_M),
        top_k=top_k[truncating],
        top_p=params["top_p"][truncating],
        min_p=params["min_p"][truncating],
    )
    least_N = probs_NV.new_zeros(len(probs_NV)).index_copy_(0, rows_M, least_M)
    return probs_NV.where(probs_NV >= least_N[:, None], 0)


def _least_kept(
    probs_MV: Tensor,
    *,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float32],
) -> Tensor:
    """The least probability that each row keeps: all three filters keep the most probable tokens.

    Tokens that tie with the least probable kept one stay, so nothing depends on the order in which
    a sort leaves ties. Rows that top_p limits are sorted in full only if FIRST_SORTED tokens do
    not reach their mass.
    """
    vocab_size = probs_MV.shape[1]
    limited, nucleus = top_k < vocab_size, top_p < 1
    num_sorted = int(top_k[limited].max(initial=1))
    if nucleus.any():
        num_sorted = max(num_sorted, min(FIRST_SORTED, vocab_size))
    sorted_MV = probs_MV.topk(num_sorted, dim=1).values
    last_M1 = _to(probs_MV, np.minimum(top_k, num_sorted) - 1)[:, None]
    least_M = sorted_MV.gather(1, last_M1)[:, 0] * _to(probs_MV, limited)
    least_M = torch.maximum(least_M, sorted_MV[:, 0] * _to(probs_MV, min_p))
    if not nucleus.any():
        return least_M
    kept_MV = probs_MV.where(probs_MV >= least_M[:, None], 0)
    target_M = kept_MV.sum(dim=1, dtype=torch.float64) * _to(probs_MV, top_p)
    mass_MV = sorted_MV.cumsum(dim=1, dtype=torch.float64)
    unlimited_M = _to(probs_MV, nucleus & ~limited)
    if num_sorted < vocab_size and ((mass_MV[:, -1] < target_M) & unlimited_M).any():
        sorted_MV = probs_MV.sort(dim=1, descending=True).values
        mass_MV = sorted_MV.cumsum(dim=1, dtype=torch.float64)
    reached_M1 = torch.searchsorted(mass_MV, target_M[:, None])
    reached_M1.clamp_(max=mass_MV.shape[1] - 1)
    nucleus_M = sorted_MV.gather(1, reached_M1)[:, 0] * _to(probs_MV, nucleus)
    return torch.maximum(least_M, nucleus_M)


def _invert_cdf(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The first token, in vocabulary order, whose cumulated share exceeds the row's uniform."""
    cdf_NV = probs_NV.cumsum(dim=1, dtype=torch.float64)
    targets_N1 = uniforms_N[:, None] * cdf_NV[:, -1:]
    ids_N = torch.searchsorted(cdf_NV, targets_N1, right=True)[:, 0]
    return ids_N.clamp_(max=probs_NV.shape[1] - 1)  # rows of NaN end up past the end


def _to(like: Tensor, array: NDArray[Any]) -> Tensor:
    """A host array as a tensor on `like`'s device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
