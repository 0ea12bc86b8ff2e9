"""What requests change about the model's logits before temperature: min_tokens, bias, penalties.

The order is vLLM's (https://docs.vllm.ai/en/stable/api/vllm/v1/sample/sampler): min_tokens and
logit_bias, then the repetition, frequency and presence penalties.

Shapes: R rows that sample · N of them with a rule · M of them with one kind of rule · V vocabulary.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.messages import NewSlot, SlotParams, StepPlan
from aioengine.worker.sampler import SamplingBatch
from aioengine.worker.staging import send
from aioengine.worker.token_counts import TokenCounts

PENALTIES: Final = np.dtype(
    [("repetition", np.float32), ("frequency", np.float32), ("presence", np.float32)]
)

Entries = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Token ids, and what is added to the logit of each."""


class LogitRules:
    """State of the output rank, by slot; a new tenant starts afresh.

    It can be rebuilt from the plans alone, so a preempted request goes on as if nothing had been.
    Rows without a rule cost nothing.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._penalties = np.zeros(num_slots, PENALTIES)
        self._counts = TokenCounts(num_slots, vocab_size, device)
        self._biases: dict[int, Entries] = {}
        self._withheld: dict[int, Entries] = {}
        """What may not be drawn yet."""
        self._has_rules = np.zeros(num_slots, np.bool_)
        """Whether anything is ever done to the logits of the slot's tenant."""
        self._withheld_until = np.zeros(num_slots, np.int64)
        """Position from which on everything may be drawn."""

    def observe(self, plan: StepPlan) -> None:
        """Take what a plan says, before its logits come."""
        for new in plan.new_slots:
            self._enter(new)
        if not self._counts.is_open:
            return
        self._counts.add((part.slot, 0, part.token_ids) for part in plan.history)
        self._counts.add((step.slot, step.start, step.token_ids) for step in plan.steps)

    def process(self, logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
        """The logits that tokens are drawn from; the same tensor if no row has a rule."""
        slots = batch.rows.slots
        if not self._has_rules[slots].any():
            return logits_RV
        is_counted = self._counts.has(slots)
        is_withheld = batch.positions < self._withheld_until[slots]
        is_biased = np.array([slot in self._biases for slot in slots.tolist()], np.bool_)
        ruled = np.flatnonzero(is_counted | is_withheld | is_biased)
        if not len(ruled):
            return logits_RV
        rows_N = send(ruled, logits_RV.device)
        x_NV = logits_RV.index_select(0, rows_N)
        _add_entries(x_NV, slots[ruled], is_withheld[ruled], self._withheld)
        _add_entries(x_NV, slots[ruled], is_biased[ruled], self._biases)
        counted = np.flatnonzero(is_counted[ruled])
        if len(counted):
            rows_M, slots_M = send(counted, x_NV.device), slots[ruled][counted]
            prompt_MV, output_MV = self._counts.look_up(slots_M)
            x_MV = x_NV.index_select(0, rows_M)
            x_MV = penalise(x_MV, prompt_MV, output_MV, self._penalties[slots_M])
            x_NV.index_copy_(0, rows_M, x_MV)
        return logits_RV.index_copy(0, rows_N, x_NV)

    def record(self, batch: SamplingBatch, ids_R: Tensor) -> None:
        """Count what was drawn."""
        if not self._counts.is_open:
            return
        slots = batch.rows.slots
        counted = np.flatnonzero(self._counts.has(slots))
        if len(counted):
            ids_M = ids_R.index_select(0, send(counted, ids_R.device))
            self._counts.record(slots[counted], batch.positions[counted], ids_M)

    def _enter(self, new: NewSlot) -> None:
        slot, params = new.slot, new.params
        self._biases.pop(slot, None)
        self._withheld.pop(slot, None)
        self._withheld_until[slot] = 0
        if params.logit_bias:
            self._biases[slot] = (
                np.array([token_id for token_id, _ in params.logit_bias], np.int64),
                np.array([value for _, value in params.logit_bias], np.float32),
            )
        if params.min_tokens and params.stop_token_ids:
            ids = np.array(params.stop_token_ids, np.int64)
            self._withheld[slot] = ids, np.full(len(ids), -np.inf, np.float32)
            self._withheld_until[slot] = params.num_prompt_tokens + params.min_tokens
        if _has_penalties(params):
            self._counts.open(slot, params.num_prompt_tokens)
            self._penalties[slot] = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        else:
            self._counts.close(slot)
        self._has_rules[slot] = (
            slot in self._biases or slot in self._withheld or _has_penalties(params)
        )


def penalise(
    logits_MV: Tensor, prompt_MV: Tensor, output_MV: Tensor, penalties: NDArray[np.void]
) -> Tensor:
    """The three penalties, in this order.

    Repetition, over prompt and output: positive logits are divided by it, others multiplied
    (Keskar et al., "CTRL", 2019, https://arxiv.org/abs/1909.05858, in the form of transformers'
    RepetitionPenaltyLogitsProcessor). Frequency and presence, over the output alone: logit -
    count × frequency - (count > 0) × presence
    (https://platform.openai.com/docs/guides/text-generation, "Frequency and presence penalties").
    """
    drawn_MV = output_MV > 0
    repetition_M1, frequency_M1, presence_M1 = (
        send(penalties[name], logits_MV.device)[:, None]
        for name in ("repetition", "frequency", "presence")
    )
    factor_MV = repetition_M1.masked_fill(~(prompt_MV | drawn_MV), 1.0)
    out_MV = torch.where(logits_MV > 0, logits_MV / factor_MV, logits_MV * factor_MV)
    return out_MV - frequency_M1 * output_MV - presence_M1 * drawn_MV


def _has_penalties(params: SlotParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def _add_entries(
    x_NV: Tensor,
    slots: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    by_slot: Mapping[int, Entries],
) -> None:
    """Adds to some entries of the chosen rows, in place."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return
    entries = [by_slot[slot] for slot in slots[rows].tolist()]
    device = x_NV.device
    row_of = send(rows.repeat([len(ids) for ids, _ in entries]), device)
    ids = send(np.concatenate([ids for ids, _ in entries]), device)
    values = send(np.concatenate([values for _, values in entries]), device)
    x_NV.index_put_((row_of, ids), values, accumulate=True)
