"""Log probabilities of prompt tokens: which hidden states of a step predict one, and what they say.

Every rank of the last stage keeps a `PromptWatch`, since all of them take part in computing the
logits; what to compute follows from the plans alone.

Shapes: T tokens of the step · D hidden size · N tokens described in one piece · V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from aioengine.messages import NewSlot, PromptLogprobs, SlotStep, TokenLogprobs
from aioengine.worker.logprobs import describe, tabulate
from aioengine.worker.staging import fetch, send

ROWS_PER_PIECE: Final = 256
"""Bounds the logits that exist at one time."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens of one request that a step predicts."""

    slot: int
    epoch: int
    start: int
    """Position of the first of them."""
    token_ids: tuple[int, ...]
    first_row: int
    """The token of the step that predicts the first of them; the next predicts the second, …"""
    num_top: int


class PromptWatch:
    """Remembers which slots want their prompt described."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[int, int]] = {}
        """Slot -> (number of prompt tokens, number of best tokens to report)."""

    def enter(self, new: NewSlot) -> None:
        """A request enters its slot."""
        params = new.params
        if params.prompt_logprobs is None:
            self._wanted.pop(new.slot, None)
        else:
            self._wanted[new.slot] = params.num_prompt_tokens, params.prompt_logprobs

    def chunks(
        self, steps: Sequence[SlotStep], first_rows: Sequence[int]
    ) -> tuple[PromptChunk, ...]:
        """What a step describes; `first_rows` says where each SlotStep begins in it."""
        if not self._wanted:
            return ()
        found = []
        for step, first_row in zip(steps, first_rows, strict=True):
            num_prompt_tokens, num_top = self._wanted.get(step.slot, (0, 0))
            known = step.token_ids[1:]
            if step.next_prompt_id >= 0:
                known += (step.next_prompt_id,)
            targets = known[: max(0, num_prompt_tokens - step.start - 1)]
            if targets:
                found.append(
                    PromptChunk(step.slot, step.epoch, step.start + 1, targets, first_row, num_top)
                )
        return tuple(found)


def describe_prompts(
    chunks: Sequence[PromptChunk],
    hidden_TD: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    *,
    is_output: bool,
) -> tuple[PromptLogprobs, ...]:
    """All ranks of the last stage compute the same pieces; the output rank describes them.

    The model's own log probabilities, in whichever mode those of drawn tokens are.
    """
    rows = [row for c in chunks for row in range(c.first_row, c.first_row + len(c.token_ids))]
    targets = [token_id for chunk in chunks for token_id in chunk.token_ids]
    num_top = [chunk.num_top for chunk in chunks for _ in chunk.token_ids]
    described: list[TokenLogprobs] = []
    for start in range(0, len(rows), ROWS_PER_PIECE):
        piece = slice(start, start + ROWS_PER_PIECE)
        rows_N = send(np.array(rows[piece]), hidden_TD.device)
        logits_NV = compute_logits(hidden_TD.index_select(0, rows_N))
        if is_output:
            targets_N = send(np.array(targets[piece]), hidden_TD.device)
            table = tabulate(logits_NV.log_softmax(dim=1), targets_N, num_top[piece])
            described += describe(fetch(table.tensors), num_top[piece])
    if not is_output:
        return ()
    left = iter(described)
    return tuple(
        PromptLogprobs(c.slot, c.epoch, c.start, tuple(next(left) for _ in c.token_ids))
        for c in chunks
    )
