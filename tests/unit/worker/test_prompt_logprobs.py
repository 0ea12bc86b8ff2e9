"""Which rows describe prompt tokens, in pieces, and that each token is described once."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import GREEDY
from torch import Tensor

from aioengine.messages import NewSlot, SlotStep
from aioengine.worker import prompt_logprobs
from aioengine.worker.prompt_logprobs import PromptWatch, describe_prompts

VOCAB_SIZE = 17


def new_slot(slot: int, num_prompt: int, num_top: int | None, epoch: int = 1) -> NewSlot:
    params = msgspec.structs.replace(GREEDY, num_prompt_tokens=num_prompt, prompt_logprobs=num_top)
    return NewSlot(slot, epoch, params)


def step(slot: int, start: int, token_ids: list[int], next_prompt_id: int = -1) -> SlotStep:
    return SlotStep(slot, 1, start, tuple(token_ids), (), next_prompt_id < 0, next_prompt_id)


def compute_logits(hidden_TD: Tensor) -> Tensor:
    """A head that only passes on."""
    return hidden_TD.float()


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12), min_size=1, max_size=4
    ),
    rows_per_piece=st.integers(1, 7),
    data=st.data(),
)
def test_any_chunking_describes_every_token(
    prompts: list[list[int]], rows_per_piece: int, data: st.DataObject
) -> None:
    """Beside requests that want none, and with output among the literals after a preemption."""
    watch = PromptWatch()
    tops = data.draw(st.lists(st.sampled_from([None, 0, 3]), min_size=4, max_size=4))
    for slot, prompt in enumerate(prompts):
        watch.enter(new_slot(slot, len(prompt), tops[slot]))
    generator = torch.Generator().manual_seed(len(prompts))
    sequences = [[*prompt, *range(data.draw(st.integers(0, 3)))] for prompt in prompts]
    logits = [torch.randn(len(tokens), VOCAB_SIZE, generator=generator) for tokens in sequences]
    found: list[list[tuple[float, int, list[int]]]] = [[] for _ in prompts]
    starts = [0] * len(prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_logprobs, "ROWS_PER_PIECE", rows_per_piece)
        while any(start < len(s) for start, s in zip(starts, sequences, strict=True)):
            steps, hidden, first_rows = [], [], []
            for slot, tokens in enumerate(sequences):
                start = starts[slot]
                if start == len(tokens):
                    continue
                end = data.draw(st.integers(start + 1, len(tokens)))
                more = tops[slot] is not None and end < len(prompts[slot])
                first_rows.append(sum(map(len, hidden)))
                steps.append(step(slot, start, tokens[start:end], tokens[end] if more else -1))
                hidden.append(logits[slot][start:end])
                starts[slot] = end
            chunks = watch.chunks(steps, first_rows)
            described = describe_prompts(chunks, torch.cat(hidden), compute_logits, is_output=True)
            for part in described:
                assert part.start == 1 + len(found[part.slot])
                found[part.slot] += [
                    (one.logprob, one.rank, [token_id for token_id, _ in one.top])
                    for one in part.logprobs
                ]
    for slot, prompt in enumerate(prompts):
        top = tops[slot]
        if top is None:
            assert found[slot] == []
            continue
        assert len(found[slot]) == len(prompt) - 1
        for position, (logprob, rank, best) in enumerate(found[slot], start=1):
            row = logits[slot][position - 1].log_softmax(0)
            assert logprob == pytest.approx(float(row[prompt[position]]), abs=1e-6)
            assert rank == 1 + int((row > row[prompt[position]]).sum())
            assert best == row.topk(top).indices.tolist()


def test_every_rank_computes_the_same_pieces_and_one_describes_them() -> None:
    watch = PromptWatch()
    watch.enter(new_slot(0, 600, 1))
    chunks = watch.chunks([step(0, 0, [1] * 600)], [0])
    sizes: list[list[int]] = []
    for is_output in (True, False):
        seen: list[int] = []

        def counted(hidden_TD: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(len(hidden_TD))
            return hidden_TD

        hidden_TD = torch.zeros(600, VOCAB_SIZE)
        parts = describe_prompts(chunks, hidden_TD, counted, is_output=is_output)
        assert [len(part.logprobs) for part in parts] == ([599] if is_output else [])
        sizes.append(seen)
    assert sizes[0] == sizes[1] == [256, 256, 87]


def test_a_new_tenant_decides_anew() -> None:
    watch = PromptWatch()
    watch.enter(new_slot(2, 5, 1))
    watch.enter(new_slot(2, 5, None, epoch=2))
    assert watch.chunks([step(2, 0, [1, 2, 3, 4, 5])], [0]) == ()
