"""From a StepPlan to tensors. Keeps, per slot, what plans send once: block table and parameters.

Shapes: T tokens · R rows (requests of the step) · S rows that sample · B blocks of the longest row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.layers.forward_batch import Attention, ForwardBatch, LayerCache, PagedInputs
from aioengine.messages import PREV, SlotStep, StepPlan
from aioengine.timeline.probe import Kind, Probe
from aioengine.worker.prompt_logprobs import PromptChunk, PromptWatch
from aioengine.worker.sampler import ROW_PARAMS, SamplingBatch, row_params
from aioengine.worker.staging import CopyFence, StagedArray


@dataclass(frozen=True, slots=True)
class Role:
    """What a rank does in a step, apart from running its layers."""

    is_first: bool
    """Its stage embeds token ids."""
    is_last: bool
    """Its stage computes logits."""
    is_output: bool
    """It samples."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step on this rank. Tensors are views that the next step overwrites."""

    forward: ForwardBatch
    sample_rows_S: Tensor
    """int64: the token of the step whose logits each sampling row draws from."""
    sampled_slots_S: Tensor
    """int64: the slot that each sampled id belongs to."""
    sampling: SamplingBatch | None
    """On the output rank."""
    prompt_chunks: tuple[PromptChunk, ...]
    """On the last stage: prompt tokens whose log probabilities are asked for."""


class BatchBuilder:
    """Applies plans in order; owns the slot tables and the staged input tensors.

    `max_model_len` bounds the positions of a request, `num_slots` the slots; `attention` makes a
    step's attention over `kv_caches`.
    """

    def __init__(
        self,
        role: Role,
        kv_caches: Mapping[int, LayerCache],
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        attention: Callable[[PagedInputs], Attention],
    ) -> None:
        self._role = role
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._attention = attention
        max_blocks = -(-max_model_len // block_size)
        self._epochs = np.full(num_slots, -1, np.int64)
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._block_table = np.zeros((num_slots, max_blocks), np.int64)
        self._params = np.zeros(num_slots, ROW_PARAMS)
        self._prompts = PromptWatch()

        self._fence = CopyFence(device)
        self._token_ids_T = StagedArray(max_num_batched_tokens, device)
        self._positions_T = StagedArray(max_num_batched_tokens, device)
        self._slot_mapping_T = StagedArray(max_num_batched_tokens, device)
        self._block_table_RB = StagedArray(num_slots * max_blocks, device)
        self._context_lens_R = StagedArray(num_slots, device)
        self._sample_rows_S = StagedArray(num_slots, device)
        self._sampled_slots_S = StagedArray(num_slots, device)
        self._prev_tokens = StagedArray(num_slots, device)
        self._prev_slots = StagedArray(num_slots, device)

    def build(self, plan: StepPlan, last_ids: Callable[[], Tensor]) -> StepInputs:
        """`last_ids` gives each slot's latest sampled id; called when the plan has a PREV."""
        self._apply(plan)
        steps = sorted(plan.steps, key=lambda step: len(step.token_ids) > 1)
        slots = np.array([step.slot for step in steps])
        epochs = np.array([step.epoch for step in steps])
        assert (self._epochs[slots] == epochs).all(), f"slots {slots} are not at epochs {epochs}"
        starts = np.array([step.start for step in steps])
        query_lens = np.array([len(step.token_ids) for step in steps])
        row_ends = query_lens.cumsum()
        positions = np.arange(row_ends[-1]) + (starts - row_ends + query_lens).repeat(query_lens)
        samples = np.array([step.sample for step in steps])

        self._fence.wait()
        forward = ForwardBatch(
            token_ids_T=self._token_ids(steps, row_ends, last_ids) if self._role.is_first else None,
            positions_T=self._positions_T.send(positions),
            attention=self._attention(
                self._paged_inputs(slots, query_lens, starts + query_lens, positions)
            ),
            kv_caches=self._kv_caches,
        )
        inputs = StepInputs(
            forward=forward,
            sample_rows_S=self._sample_rows_S.send(row_ends[samples] - 1),
            sampled_slots_S=self._sampled_slots_S.send(slots[samples]),
            sampling=self._sampling(slots[samples], (starts + query_lens)[samples])
            if self._role.is_output
            else None,
            prompt_chunks=self._prompts.chunks(steps, (row_ends - query_lens).tolist())
            if self._role.is_last
            else (),
        )
        self._fence.record()
        return inputs

    def probes(self) -> list[Probe]:
        attention = {"write_kv": Kind.ATTENTION, "attend": Kind.ATTENTION}
        return [
            Probe(self, "build", Kind.BATCH),
            Probe(self, "_attention", Kind.BATCH, attention),
        ]

    def _apply(self, plan: StepPlan) -> None:
        for new in plan.new_slots:
            self._epochs[new.slot] = new.epoch
            self._num_blocks[new.slot] = 0
            self._params[new.slot] = row_params(new.params)
            self._prompts.enter(new)
        for step in plan.steps:
            if step.new_block_ids:
                first = self._num_blocks[step.slot]
                last = first + len(step.new_block_ids)
                self._block_table[step.slot, first:last] = step.new_block_ids
                self._num_blocks[step.slot] = last

    def _token_ids(
        self, steps: list[SlotStep], row_ends: NDArray[np.int64], last_ids: Callable[[], Tensor]
    ) -> Tensor:
        literal_T = np.fromiter(
            chain.from_iterable(step.token_ids for step in steps), np.int64, row_ends[-1]
        )
        token_ids_T = self._token_ids_T.send(literal_T)
        prev = np.flatnonzero(literal_T == PREV)  # in rows of one token, so row number = token
        if len(prev):
            slots = np.array([steps[row].slot for row in prev])
            ids = last_ids().index_select(0, self._prev_slots.send(slots))
            token_ids_T.index_copy_(0, self._prev_tokens.send(prev), ids)
        return token_ids_T

    def _paged_inputs(
        self,
        slots: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        context_lens: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> PagedInputs:
        blocks, offsets = np.divmod(positions, self._block_size)
        block_ids = self._block_table[slots.repeat(query_lens), blocks]
        num_blocks = blocks.max() + 1
        return PagedInputs(
            slot_mapping_T=self._slot_mapping_T.send(block_ids * self._block_size + offsets),
            block_table_RB=self._block_table_RB.send(self._block_table[slots, :num_blocks]),
            context_lens_R=self._context_lens_R.send(context_lens),
            query_lens=tuple(query_lens.tolist()),
            context_lens=tuple(context_lens.tolist()),
            num_decodes=int((query_lens == 1).sum()),
            block_size=self._block_size,
        )

    def _sampling(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingBatch:
        return SamplingBatch(slots, self._epochs[slots], positions, self._params[slots])
