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
from aioengine.worker.decode_rows import DecodeRows, LastIds
from aioengine.worker.prompt_logprobs import PromptChunk, PromptWatch
from aioengine.worker.sampler import SamplingBatch, SamplingRows
from aioengine.worker.slot_tables import SlotTables
from aioengine.worker.staging import StagedInputs


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
    """One step on this rank. Tensors are views that a later step overwrites."""

    forward: ForwardBatch
    sample_rows_S: Tensor | None
    """int64: the token of the step whose logits each sampling row draws from; None where every
    token is such a one, in order."""
    sampled_slots_S: Tensor
    """int64: the slot that each sampled id belongs to."""
    sampled_slots: NDArray[np.int64]
    """The same on the host."""
    sampling: SamplingBatch | None
    """On the output rank."""
    prompt_chunks: tuple[PromptChunk, ...] = ()
    """On the last stage: prompt tokens whose log probabilities are asked for."""


class BatchBuilder:
    """Applies plans in order; owns the slot tables and the staged input tensors.

    `max_model_len` bounds the positions of a request, `num_slots` the slots; `attention` makes a
    step's attention over `kv_caches`. `num_microbatches` is how many groups of requests take turns:
    each keeps tensors of its own, which its next decode step only advances.
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
        num_microbatches: int = 1,
    ) -> None:
        self._role = role
        self._kv_caches = kv_caches
        self._attention = attention
        self._tables = SlotTables(num_slots, max_model_len, block_size)
        self._prompts = PromptWatch()
        self._staged = [
            StagedInputs(num_slots, max_num_batched_tokens, self._tables.max_blocks, device)
            for _ in range(num_microbatches)
        ]
        self._decoding: list[DecodeRows | None] = [None] * num_microbatches
        """What the staged inputs hold, where it can be advanced. The latest used stands last."""

    def build(self, plan: StepPlan, last_ids: LastIds) -> StepInputs:
        """`last_ids` is called when the plan has a PREV."""
        if plan.new_slots:
            self._enter(plan)
        self._tables.extend(plan.steps)
        slots = _decoding_slots(plan.steps)
        turn = self._turn_of(slots)
        staged, rows = self._staged.pop(turn), self._decoding.pop(turn)
        staged.fence.wait()
        if slots is None:
            rows, inputs = None, self._mixed(staged, plan.steps, last_ids)
        else:
            if rows is None or rows.slots != slots:
                rows = DecodeRows(self._tables, staged, plan.steps, slots)
            inputs = self._advance(rows, plan.steps, last_ids)
        staged.fence.record()
        self._staged.append(staged)
        self._decoding.append(rows)
        return inputs

    def _enter(self, plan: StepPlan) -> None:
        for new in plan.new_slots:
            self._tables.enter(new)
            self._prompts.enter(new)
        # A slot of theirs may have a new tenant.
        self._decoding = [None] * len(self._decoding)

    def _turn_of(self, slots: tuple[int, ...] | None) -> int:
        """Which staged inputs a step takes: those that hold its rows, else the least recent."""
        if slots is not None:
            for turn, rows in enumerate(self._decoding):
                if rows is not None and rows.slots == slots:
                    return turn
        return 0

    def _advance(
        self, rows: DecodeRows, steps: tuple[SlotStep, ...], last_ids: LastIds
    ) -> StepInputs:
        """A step in which every row decodes."""
        paged = rows.advance(steps)
        return StepInputs(
            forward=ForwardBatch(
                token_ids_T=rows.token_ids(steps, last_ids) if self._role.is_first else None,
                positions_T=rows.positions_T,
                attention=self._attention(paged),
                kv_caches=self._kv_caches,
            ),
            sample_rows_S=None,
            sampled_slots_S=rows.slots_R,
            sampled_slots=rows.host_slots,
            sampling=rows.sampling() if self._role.is_output else None,
        )

    def _mixed(
        self,
        staged: StagedInputs,
        plan_steps: tuple[SlotStep, ...],
        last_ids: LastIds,
    ) -> StepInputs:
        """A step of which at least one row has several tokens, or draws none."""
        steps = sorted(plan_steps, key=lambda step: len(step.token_ids) > 1)
        slots = np.array([step.slot for step in steps])
        epochs = self._tables.epochs(slots).tolist()
        assert epochs == [step.epoch for step in steps], f"slots {slots} are at {epochs=}"
        starts = np.array([step.start for step in steps])
        query_lens = np.array([len(step.token_ids) for step in steps])
        row_ends = query_lens.cumsum()
        positions = np.arange(row_ends[-1]) + (starts - row_ends + query_lens).repeat(query_lens)
        samples = np.array([step.sample for step in steps])
        context_lens = starts + query_lens
        paged = self._paged_inputs(staged, slots, query_lens, context_lens, positions)
        forward = ForwardBatch(
            token_ids_T=_token_ids(staged, steps, row_ends, last_ids)
            if self._role.is_first
            else None,
            positions_T=staged.positions_T.send(positions),
            attention=self._attention(paged),
            kv_caches=self._kv_caches,
        )
        sampling = None
        if self._role.is_output:
            rows = SamplingRows(*self._tables.tenants(slots[samples]))
            sampling = SamplingBatch(rows, context_lens[samples])
        return StepInputs(
            forward=forward,
            sample_rows_S=staged.sample_rows_S.send(row_ends[samples] - 1),
            sampled_slots_S=staged.slots_R.send(slots[samples]),
            sampled_slots=slots[samples],
            sampling=sampling,
            prompt_chunks=self._prompts.chunks(steps, (row_ends - query_lens).tolist())
            if self._role.is_last
            else (),
        )

    def probes(self) -> list[Probe]:
        attention = {"write_kv": Kind.ATTENTION, "attend": Kind.ATTENTION}
        return [
            Probe(self, "build", Kind.BATCH),
            Probe(self, "_attention", Kind.BATCH, attention),
        ]

    def _paged_inputs(
        self,
        staged: StagedInputs,
        slots: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        context_lens: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> PagedInputs:
        tables = self._tables
        places = tables.cache_slots(slots.repeat(query_lens), positions)
        num_blocks = tables.num_blocks_for(int(context_lens.max()))
        return PagedInputs(
            slot_mapping_T=staged.slot_mapping_T.send(places),
            block_table_RB=staged.block_table_RB.send(tables.block_table[slots, :num_blocks]),
            context_lens_R=staged.context_lens_R.send(context_lens),
            query_lens=tuple(query_lens.tolist()),
            context_lens=tuple(context_lens.tolist()),
            num_decodes=int((query_lens == 1).sum()),
            block_size=tables.block_size,
        )


def _decoding_slots(steps: tuple[SlotStep, ...]) -> tuple[int, ...] | None:
    """The rows' slots, if each of them has one token and draws the next."""
    for step in steps:
        if not step.sample or len(step.token_ids) > 1:
            return None
    return tuple([step.slot for step in steps])


def _token_ids(
    staged: StagedInputs,
    steps: list[SlotStep],
    row_ends: NDArray[np.int64],
    last_ids: LastIds,
) -> Tensor:
    literal_T = np.fromiter(
        chain.from_iterable(step.token_ids for step in steps), np.int64, row_ends[-1]
    )
    token_ids_T = staged.token_ids_T.send(literal_T)
    prev = np.flatnonzero(literal_T == PREV)  # in rows of one token, so row number = token
    if len(prev):
        slots = np.array([steps[row].slot for row in prev])
        ids = last_ids(slots).index_select(0, staged.prev_slots.send(slots))
        token_ids_T.index_copy_(0, staged.prev_tokens.send(prev), ids)
    return token_ids_T
