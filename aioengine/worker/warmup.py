"""Plans that no request asked for: they run through the null block, before the replica is ready."""

from typing import Any, Final

import msgspec

from aioengine.messages import PREV, NewSlot, SlotParams, SlotStep, StepPlan

_NULL_BLOCK: Final = 0
_NUM_PROMPT_TOKENS: Final = 32
"""Enough for what is done to many rows only: it would else be compiled in a request's step."""
_NUM_DECODES: Final = 3
"""One is computed, one captured and one repeated (see `graphs.py`)."""
_PARAMS: Final = SlotParams(
    temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=0, choice_index=0, logprobs=0
)


def warm_up_plans(
    max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> list[StepPlan]:
    """A short prefill and, where the context has room, decodes of the tokens that are drawn."""
    num_tokens = max(1, min(_NUM_PROMPT_TOKENS, max_num_batched_tokens, max_model_len - 1))
    plans = [_plan([num_tokens], block_size)]
    end = min(num_tokens + _NUM_DECODES, max_model_len)
    for position in range(num_tokens, end):
        new_blocks = (_NULL_BLOCK,) if position % block_size == 0 else ()
        decode = SlotStep(0, 0, position, (PREV,), new_blocks, sample=True)
        plans.append(StepPlan((), (decode,), share_sampled=position + 1 < end))
    return plans


def largest_plan(
    max_num_batched_tokens: int, max_model_len: int, num_slots: int, block_size: int
) -> StepPlan:
    """As many tokens as a step can have, with every slot sampling under penalties and every prompt
    described: the most memory a step takes."""
    lengths = []
    left = max_num_batched_tokens
    for slot in range(num_slots):
        lengths.append(min(max_model_len, left - (num_slots - slot - 1)))
        left -= lengths[-1]
    return _plan(lengths, block_size, repetition_penalty=1.1, prompt_logprobs=0)


def _plan(lengths: list[int], block_size: int, **params: Any) -> StepPlan:
    """One row of zeros per length, each new in its slot."""
    asked = msgspec.structs.replace(_PARAMS, **params)
    return StepPlan(
        tuple(
            NewSlot(slot, 0, msgspec.structs.replace(asked, num_prompt_tokens=length))
            for slot, length in enumerate(lengths)
        ),
        tuple(
            SlotStep(slot, 0, 0, (0,) * length, (_NULL_BLOCK,) * -(-length // block_size), True)
            for slot, length in enumerate(lengths)
        ),
        share_sampled=True,
    )
