"""Attention over the paged cache equals attention over each row's own tokens, written plainly."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from aioengine.kernels.team import Team
from aioengine.layers import attention as attention_module
from aioengine.layers.attention import (
    GATHER,
    AttentionBackend,
    GatherAttention,
    attention_backend,
)
from aioengine.layers.forward_batch import LayerCache, PagedInputs
from aioengine.worker.kv_store import KVShape

BLOCK_SIZE = 16
NUM_BLOCKS = 24
HEAD_DIMS = [8, 20, 64, 96]
BACKENDS = {
    "gather": GATHER,
    "cpu kernels": attention_backend("cpu", BLOCK_SIZE, Team(1)),
}


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
        heads.append((k_LH @ q_H / math.sqrt(len(q_H))).softmax(0) @ v_LH)
    return torch.stack(heads)


@pytest.mark.parametrize("max_gathered", [1, 40, 2**16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize(
    ("query_lens", "lens"),
    [
        ([1], [1]),
        ([7], [7]),
        ([1, 1, 1], [16, 9, 70]),
        ([1, 1, 6, 25, 2], [33, 1, 6, 31, 48]),
    ],
    ids=["first token", "prefill", "decodes", "mixed"],
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_equals_plain_attention(
    backend: AttentionBackend,
    head_dim: int,
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
    cache = unwritten_cache(backend, num_kv_heads, head_dim, torch.float32)
    histories = [
        torch.randn(2, length, num_kv_heads, head_dim, generator=generator) for length in lens
    ]
    before = paged_inputs(tables, lens, lens)
    backend.begin(before).write_kv(cache, *torch.cat(histories, dim=1).unbind())

    attention = backend.begin(paged_inputs(tables, query_lens, lens))
    q_TNH = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    expected = [
        (history[0, : position + 1], history[1, : position + 1])
        for history, query_len, length in zip(histories, query_lens, lens, strict=True)
        for position in range(length - query_len, length)
    ]
    expected_TNH = torch.stack(
        [plain_attention(q_NH, k, v) for q_NH, (k, v) in zip(q_TNH, expected, strict=True)]
    )
    torch.testing.assert_close(attention.attend(cache, q_TNH), expected_TNH, atol=1e-5, rtol=1e-5)


def unwritten_cache(
    backend: AttentionBackend, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> LayerCache:
    """What no row has written is NaN: reading it anywhere shows in the result."""
    shape = KVShape(range(1), BLOCK_SIZE, num_kv_heads, head_dim, dtype)
    cache = shape.allocate(NUM_BLOCKS, torch.device("cpu"), backend)[0]
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 33), (torch.float16, 64)]
)
def test_half_types_are_rounded_once(dtype: torch.dtype, head_dim: int) -> None:
    """Compiled attention sums in float32, over strided rows as a fused projection gives them."""
    lens, tables = [37, 5], [[3, 9, 1], [7]]
    backend = BACKENDS["cpu kernels"]
    cache = unwritten_cache(backend, 2, head_dim, dtype)
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(sum(lens), 2 + 2, head_dim, generator=generator).to(dtype)
    k_TKH, v_TKH = fused[:, :2], fused[:, 2:]
    backend.begin(paged_inputs(tables, lens, lens)).write_kv(cache, k_TKH, v_TKH)
    q_TNH = torch.randn(2, 8 + 1, head_dim, generator=generator).to(dtype)[:, :8]
    out_TNH = backend.begin(paged_inputs(tables, [1, 1], lens)).attend(cache, q_TNH)
    histories = zip(k_TKH.float().split(lens), v_TKH.float().split(lens), strict=True)
    exact_TNH = torch.stack(
        [plain_attention(q_NH.float(), k, v) for q_NH, (k, v) in zip(q_TNH, histories, strict=True)]
    )
    assert_close(out_TNH, exact_TNH)


def assert_close(out_TNH: Tensor, exact_TNH: Tensor) -> None:
    """Dot products of bfloat16 round the weights of values as well."""
    dtype = out_TNH.dtype
    atol = eps_of(dtype) / 2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(out_TNH, exact_TNH.to(dtype), atol=atol, rtol=eps_of(dtype))


def eps_of(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("dtype", "num_heads"), [(torch.float32, 3), (torch.bfloat16, 9), (torch.float16, 6)]
)
def test_a_token_depends_on_its_own_context_alone(dtype: torch.dtype, num_heads: int) -> None:
    """Bit by bit: not on how its prompt was cut into chunks, on being one itself, nor on others."""
    length, table = 300, [list(range(NUM_BLOCKS - 1, 0, -1))]
    backend = BACKENDS["cpu kernels"]
    generator = torch.Generator().manual_seed(0)
    q_TNH = torch.randn(length, num_heads, 40, generator=generator).to(dtype)
    k_TKH, v_TKH = torch.randn(2, length, 3, 40, generator=generator).to(dtype).unbind()
    cache = unwritten_cache(backend, 3, 40, dtype)
    whole = backend.begin(paged_inputs(table, [length], [length]))
    whole.write_kv(cache, k_TKH, v_TKH)
    whole_TNH = whole.attend(cache, q_TNH)

    cache = unwritten_cache(backend, 3, 40, dtype)
    pieces = []
    for start, end in itertools.pairwise([0, 7, 8, 130, 258, 259, length]):
        chunk = backend.begin(paged_inputs(table, [end - start], [end]))
        chunk.write_kv(cache, k_TKH[start:end], v_TKH[start:end])
        pieces.append(chunk.attend(cache, q_TNH[start:end]))
    assert torch.equal(torch.cat(pieces), whole_TNH)

    decodes = backend.begin(paged_inputs(table * 3, [1, 1, 1], [300, 45, 256]))
    assert torch.equal(decodes.attend(cache, q_TNH[[299, 44, 255]]), whole_TNH[[299, 44, 255]])

    exact_TNH = torch.stack(
        [
            plain_attention(q_TNH[i].float(), k_TKH[: i + 1].float(), v_TKH[: i + 1].float())
            for i in range(length)
        ]
    )
    assert_close(whole_TNH, exact_TNH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_depends_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """One row is long enough to be cut into parts; in the second round lines of others are there.
    As a prefill it is not cut."""
    team = Team(3)
    lens, tables = [1300, 37, 5, 300], [[*range(20, 24), *range(2, 12)] * 6, [21, 22, 23], [20]]
    tables.append(list(range(1, 20)))
    generator = torch.Generator().manual_seed(0)
    outs: dict[int, list[Tensor]] = {3: [], 1: []}
    k_new, v_new = torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, 3, 64, generator=generator).to(dtype)
    q_TNH = torch.randn(103, 9, 64, generator=generator).to(dtype)
    for backend in (BACKENDS["cpu kernels"], attention_backend("cpu", BLOCK_SIZE, team)):
        cache = unwritten_cache(backend, 3, 64, dtype)
        everywhere = paged_inputs([list(range(NUM_BLOCKS))], [len(k_new)], [len(k_new)])
        backend.begin(everywhere).write_kv(cache, k_new, v_new)
        for num_decodes in outs:
            rows = slice(0, num_decodes)
            inputs = paged_inputs(
                [*tables[rows], tables[3]], [1] * num_decodes + [100], [*lens[rows], lens[3]]
            )
            outs[num_decodes].append(
                backend.begin(inputs).attend(cache, q_TNH[: num_decodes + 100])
            )
    assert torch.equal(*outs[3])
    assert torch.equal(*outs[1])
    assert torch.equal(outs[3][0][0], outs[1][0][0])
    last = paged_inputs(tables[:1], [2], lens[:1])
    prefill_TNH = BACKENDS["cpu kernels"].begin(last).attend(cache, q_TNH[[1, 0]])
    assert torch.equal(prefill_TNH[1], outs[3][0][0])
    team.close()


def test_not_a_number_stays_in_its_row() -> None:
    backend = BACKENDS["cpu kernels"]
    cache = unwritten_cache(backend, 1, 16, torch.bfloat16)
    kv_TKH = torch.ones(3, 1, 16, dtype=torch.bfloat16)
    kv_TKH[2] = torch.nan
    tables, lens = [[1], [2]], [2, 1]
    backend.begin(paged_inputs(tables, lens, lens)).write_kv(cache, kv_TKH, kv_TKH)
    attention = backend.begin(paged_inputs(tables, [1, 1], lens))
    out_TNH = attention.attend(cache, torch.ones(2, 1, 16, dtype=torch.bfloat16))
    assert (out_TNH[0] == 1).all()
    assert out_TNH[1].isnan().all()


def test_blocks_that_do_not_fit_the_kernels_are_gathered(caplog: pytest.LogCaptureFixture) -> None:
    team = Team(1)
    assert attention_backend("cpu", 24, team) is GATHER
    assert "--block-size 24 is no multiple of 16" in caplog.text
    assert attention_backend("cuda", 16, team) is GATHER
    assert attention_backend("cpu", 16, None) is GATHER


def test_decodes_are_gathered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long context does not make the others' copies as long."""
    monkeypatch.setattr(attention_module, "MAX_GATHERED_TOKENS", 30)
    lens = [4, 9, 7, 40, 1, 2, 30, 30]
    tables = [[1] * -(-length // BLOCK_SIZE) for length in lens]
    attention = GatherAttention(paged_inputs(tables, [1] * len(lens), lens))
    shapes = [tuple(group.cached_RL.shape) for group in attention._decodes]
    assert shapes == [(3, 9), (1, 40), (2, 2), (1, 30), (1, 30)]
