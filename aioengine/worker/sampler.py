"""From logits to token ids and log probabilities, vectorised over the rows of a step.

Nothing here raises because of what a request asked for or a model computed: a row whose logits are
unusable is reported as such and disturbs no other row.

Shapes: R rows that sample · N rows that draw · M rows that truncate · V vocabulary.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.messages import Sampled, SlotParams
from aioengine.worker.logprobs import TABLE_TENSORS, describe, tabulate
from aioengine.worker.philox import uniforms
from aioengine.worker.staging import fetch, send

log = logging.getLogger(__name__)

MIN_TEMPERATURE: Final = 1e-5
"""Below it a row is greedy."""
MAX_TEMPERATURE: Final = 1e30
"""Above it a row is drawn as at it, evenly: infinite in float32, it would divide -inf to NaN."""
NO_LOGPROBS: Final = -1
UNUSABLE: Final = -1
"""In place of a drawn id, on its way to the host."""
ROWS_IN_CACHE: Final = 2
"""Whose log probabilities are made at one time on CPU: 32 rows of 49,152 tokens at once take three
times as long."""
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
        min(params.temperature, MAX_TEMPERATURE),
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.choice_index,
        num_logprobs,
    )


class SamplingRows:
    """Who draws a token, and how. Stays the same while the same requests decode, so that what
    follows from it is found out once. Host memory."""

    def __init__(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], params: NDArray[np.void]
    ) -> None:
        """`params`: ROW_PARAMS records."""
        self.slots = slots
        self.epochs = epochs
        self.params = params
        self.keys = list(zip(slots.tolist(), epochs.tolist(), strict=True))
        self.drawing = np.flatnonzero(params["temperature"] >= MIN_TEMPERATURE)
        """Rows that are not greedy."""
        self.draw_params = params[self.drawing]
        self.draw_columns = [
            np.ascontiguousarray(self.draw_params[name])
            for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice")
        ]
        self.asking = np.flatnonzero(params["num_logprobs"] > NO_LOGPROBS)
        """Rows that want log probabilities."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one step that draw a token. Host memory."""

    rows: SamplingRows
    positions: NDArray[np.int64]
    """Of the token to be drawn."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What `Sampler.draw` chose, on the device."""

    ids_R: Tensor
    """int64; a row that is not usable holds some valid id."""
    best_R: Tensor
    """The greatest of the logits drawn from: not finite where one is NaN or +inf, or all are -inf.
    Such a row is not usable."""

    def marked(self) -> Tensor:
        """The ids, with UNUSABLE in rows that are not usable."""
        if self.best_R.device.type == "cpu" and np.isfinite(self.best_R.numpy()).all():
            return self.ids_R
        return self.ids_R.masked_fill(~self.best_R.isfinite(), UNUSABLE)


class Sampler:
    """Stateless: a draw depends on the row's logits, parameters and position."""

    def __init__(self, logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]) -> None:
        self._processed_logprobs = logprobs_mode == "processed_logprobs"

    def draw(self, logits_RV: Tensor, batch: SamplingBatch) -> Draws:
        """One id for each row of float32 logits, in which the requests' rules are applied."""
        best_R, ids_R = _best(logits_RV)
        rows = batch.rows
        drawing, params = rows.drawing, rows.draw_params
        device = logits_RV.device
        if len(drawing) and device.type == "cpu" and (kernel := _draw_kernel()) is not None:
            logits, positions = logits_RV.contiguous().numpy(), batch.positions[drawing]
            *limits, seeds, choices = rows.draw_columns
            kernel(logits, drawing, *limits, seeds, positions, choices, ids_R.numpy())
        elif len(drawing):
            rows_N = send(drawing, device)
            scaled_NV = logits_RV.index_select(0, rows_N) - best_R.index_select(0, rows_N)[:, None]
            scaled_NV /= send(params["temperature"], device)[:, None]
            uniforms_N = uniforms(params["seed"], batch.positions[drawing], params["choice"])
            probs_NV = _truncate(scaled_NV.softmax(dim=1), params)
            ids_R.index_copy_(0, rows_N, _invert_cdf(probs_NV, send(uniforms_N, device)))
        return Draws(ids_R, best_R)

    def report(
        self, logits_RV: Tensor, processed_RV: Tensor, draws: Draws, batch: SamplingBatch
    ) -> tuple[Sampled, ...]:
        """What the leader gets, in the order of the rows. The only wait for the device in a step.

        From the model's logits, and from those drawn from: the same tensor where they are equal.
        """
        keys, params = batch.rows.keys, batch.rows.params
        reported_RV = processed_RV if self._processed_logprobs else logits_RV
        pieces = [rows.tolist() for rows in _pieces(batch.rows.asking, logits_RV.device)]
        num_top = [params["num_logprobs"][rows].tolist() for rows in pieces]
        tables = [
            self._tabulate(reported_RV, draws.ids_R, np.array(rows), params, top)
            for rows, top in zip(pieces, num_top, strict=True)
        ]
        on_host, *table = fetch([draws.marked(), *chain.from_iterable(tables)])
        ids = on_host.tolist()
        sampled = [
            Sampled(slot, epoch, (token_id,))
            for (slot, epoch), token_id in zip(keys, ids, strict=True)
        ]
        for rows, top in zip(pieces, num_top, strict=True):
            own, table = table[:TABLE_TENSORS], table[TABLE_TENSORS:]
            for row, one in zip(rows, describe(own, top), strict=True):
                slot, epoch = keys[row]
                sampled[row] = Sampled(slot, epoch, (ids[row],), (one,))
        if UNUSABLE in ids:
            for row in [row for row, token_id in enumerate(ids) if token_id == UNUSABLE]:
                sampled[row] = Sampled(*keys[row], (), error=_blame(logits_RV[row]))
        return tuple(sampled)

    def _tabulate(
        self,
        logits_RV: Tensor,
        ids_R: Tensor,
        asking: NDArray[np.int64],
        params: NDArray[np.void],
        num_top: list[int],
    ) -> tuple[Tensor, ...]:
        """A TokenTable's tensors about the ids of the rows that asked."""
        rows_N = send(asking, logits_RV.device)
        chosen_NV = logits_RV.index_select(0, rows_N)
        if self._processed_logprobs:
            temperature = params["temperature"][asking]
            divisor = np.where(temperature < MIN_TEMPERATURE, 1, temperature)
            chosen_NV /= send(divisor, logits_RV.device)[:, None]
        ids_N = ids_R.index_select(0, rows_N)
        return tabulate(chosen_NV.log_softmax(dim=1), ids_N, num_top).tensors


def _pieces(rows: NDArray[np.int64], device: torch.device) -> list[NDArray[np.int64]]:
    """Rows to be described together: on CPU as many as stay in a core's cache."""
    if not len(rows):
        return []
    size = ROWS_IN_CACHE if device.type == "cpu" else len(rows)
    return np.split(rows, range(size, len(rows), size))


@cache
def _draw_kernel() -> Callable[..., None] | None:
    """Compiled, where numba works."""
    try:
        kernel: Callable[..., None] = importlib.import_module("aioengine.kernels.sampling").draw
    except ImportError as error:
        log.warning("sampling without compiled kernels: %s", error)
        return None
    return kernel


def _best(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's greatest logit and the first token that has it; NaN counts as greater than all.

    On CPU by numpy, whose search is vectorised: at 49,152 tokens a quarter of the time of torch's.
    """
    if logits_RV.device.type != "cpu":
        best_R, ids_R = logits_RV.max(dim=1)
        return best_R, ids_R
    logits = logits_RV.numpy()
    ids = logits.argmax(axis=1)
    return torch.from_numpy(logits[np.arange(len(ids)), ids]), torch.from_numpy(ids)


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
    rows_M = send(truncating, probs_NV.device)
    least_M = _least_kept(
        probs_NV.index_select(0, rows_M),
        top_k=top_k[truncating],
        top_p=params["top_p"][truncating],
        min_p=params["min_p"][truncating],
    )
    least_N = probs_NV.new_zeros(len(probs_NV)).index_copy_(0, rows_M, least_M)
    return probs_NV.masked_fill(probs_NV < least_N[:, None], 0)


def _least_kept(
    probs_MV: Tensor,
    *,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float32],
) -> Tensor:
    """The least probability that each row keeps: all three filters keep the most probable tokens.

    Tokens that tie with the least probable kept one stay, so nothing depends on the order in which
    a sort leaves ties. On CPU, rows that only top_p limits are sorted in full if FIRST_SORTED
    tokens do not reach their mass; elsewhere always, since to ask would make the host wait.
    """
    device, vocab_size = probs_MV.device, probs_MV.shape[1]
    limited, nucleus = top_k < vocab_size, top_p < 1
    num_sorted = int(top_k[limited].max(initial=1))
    if (nucleus & ~limited).any():
        first = FIRST_SORTED if device.type == "cpu" else vocab_size
        num_sorted = max(num_sorted, min(first, vocab_size))
    sorted_MV = probs_MV.topk(num_sorted, dim=1).values
    last_M1 = send(np.minimum(top_k, num_sorted) - 1, device)[:, None]
    least_M = sorted_MV.gather(1, last_M1)[:, 0] * send(limited, device)
    least_M = torch.maximum(least_M, sorted_MV[:, 0] * send(min_p, device))
    if not nucleus.any():
        return least_M
    kept_MV = probs_MV.masked_fill(probs_MV < least_M[:, None], 0)
    target_M = kept_MV.sum(dim=1, dtype=torch.float64) * send(top_p, device)
    mass_MV = sorted_MV.cumsum(dim=1, dtype=torch.float64)
    if device.type == "cpu" and num_sorted < vocab_size:
        unlimited_M = send(nucleus & ~limited, device)
        if ((mass_MV[:, -1] < target_M) & unlimited_M).any():
            sorted_MV = probs_MV.sort(dim=1, descending=True).values
            mass_MV = sorted_MV.cumsum(dim=1, dtype=torch.float64)
    reached_M1 = torch.searchsorted(mass_MV, target_M[:, None])
    reached_M1.clamp_(max=mass_MV.shape[1] - 1)
    nucleus_M = sorted_MV.gather(1, reached_M1)[:, 0] * send(nucleus, device)
    return torch.maximum(least_M, nucleus_M)


def _invert_cdf(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The first token, in vocabulary order, whose cumulated share exceeds the row's uniform."""
    cdf_NV = probs_NV.cumsum(dim=1, dtype=torch.float64)
    targets_N1 = uniforms_N[:, None] * cdf_NV[:, -1:]
    ids_N = torch.searchsorted(cdf_NV, targets_N1, right=True)[:, 0]
    return ids_N.clamp_(max=probs_NV.shape[1] - 1)  # rows of NaN end up past the end
