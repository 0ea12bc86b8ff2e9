"""Attention over the paged cache equals attention over each row's own tokens, written plainly."""

import math

import pytest
import torch
from torch import Tensor

from aioengine.layers import attention as attention_module
from aioengine.layers.attention import GatherAttention
from aioengine.layers.forward_batch import LayerCache, PagedInputs

BLOCK_SIZE = 4
NUM_BLOCKS = 64
HEAD_DIM = 8


def paged_inputs(tables: list[list[int]], query_lens: list[int], lens: list[int]) -> PagedInputs:
    widest = max(len(table) for table in tables)
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for table, query_len, length in zip(tables, query_lens, lens, strict=True)
        for position in range(length - query_len, length)
    ]
    return PagedInputs(
        slot_mapping_T=torch.tensor(slots),
        block_table_RB=torch.tensor([table + [0] * (widest - len(table)) for table in tables]),
        context_lens_R=torch.tensor(lens),
        query_lens=tuple(query_lens),
        context_lens=tuple(lens),
        num_decodes=query_lens.count(1),
        block_size=BLOCK_SIZE,
    )


def plain_attention(q_NH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """One token's query heads over the L tokens it may see."""
    group_size = q_NH.shape[0] // k_LKH.shape[1]
    heads = []
    for head, q_H in enumerate(q_NH):
        k_LH, v_LH = k_LKH[:, head // group_size], v_LKH[:, head // group_size]
        heads.append((k_LH @ q_H / math.sqrt(HEAD_DIM)).softmax(0) @ v_LH)
    return torch.stack(heads)


@pytest.mark.parametrize("max_gathered", [1, 40, 2**16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize(
    ("query_lens", "lens"),
    [
        ([1], [1]),
        ([7], [7]),
        ([1, 1, 1], [3, 9, 20]),
        ([1, 1, 6, 5, 2], [13, 1, 6, 11, 18]),
    ],
    ids=["first token", "prefill", "decodes", "mixed"],
)
def test_equals_plain_attention(
    num_heads: int,
    num_kv_heads: int,
    query_lens: list[int],
    lens: list[int],
    max_gathered: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_module, "MAX_GATHERED_TOKENS", max_gathered)
    generator = torch.Generator().manual_seed(0)
    order = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lens]
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, HEAD_DIM)
    # What no row has written is NaN: reading it anywhere shows in the result.
    cache = LayerCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    histories = [
        torch.randn(2, length, num_kv_heads, HEAD_DIM, generator=generator) for length in lens
    ]
    before = paged_inputs(tables, lens, lens)
    GatherAttention(before).write_kv(cache, *torch.cat(histories, dim=1).unbind())

    attention = GatherAttention(paged_inputs(tables, query_lens, lens))
    q_TNH = torch.randn(sum(query_lens), num_heads, HEAD_DIM, generator=generator)
    expected = [
        (history[0, : position + 1], history[1, : position + 1])
        for history, query_len, length in zip(histories, query_lens, lens, strict=True)
        for position in range(length - query_len, length)
    ]
    expected_TNH = torch.stack(
        [plain_attention(q_NH, k, v) for q_NH, (k, v) in zip(q_TNH, expected, strict=True)]
    )
    torch.testing.assert_close(attention.attend(cache, q_TNH), expected_TNH, atol=1e-5, rtol=1e-5)


def test_decodes_are_gathered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long context does not make the others' copies as long."""
    monkeypatch.setattr(attention_module, "MAX_GATHERED_TOKENS", 30)
    lens = [4, 9, 7, 40, 1, 2, 30, 30]
    tables = [[1] * -(-length // BLOCK_SIZE) for length in lens]
    attention = GatherAttention(paged_inputs(tables, [1] * len(lens), lens))
    shapes = [tuple(group.cached_RL.shape) for group in attention._decodes]
    assert shapes == [(3, 9), (1, 40), (2, 2), (1, 30), (1, 30)]
