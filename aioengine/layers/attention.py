"""Attention over the paged KV cache, one backend per kind of device.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · L cached tokens · Q tokens of one prefill row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aioengine.layers.forward_batch import Attention, LayerCache, PagedInputs

MAX_GATHERED_TOKENS: Final = 2**16
"""Of decode rows at one time, padding included: bounds the copy of keys and values, which else is
as large as all rows at the longest context of one."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Adjacent rows with one token each. `cached_RL`: cache slots of the R rows' contexts."""

    rows: slice
    cached_RL: Tensor
    mask_R11L: Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A row with several tokens. `mask_QL` is None when nothing precedes them (plain causal)."""

    tokens: slice
    cached_L: Tensor
    mask_QL: Tensor | None


class GatherAttention:
    """Gathers each row's cache into adjacent memory and runs torch's SDPA: right on any device.

    Nothing beyond a row's own tokens is ever gathered, so that values another request left behind
    (NaN, even) cannot reach it: padding repeats the row's last token and is masked.
    """

    def __init__(self, inputs: PagedInputs) -> None:
        self._slot_mapping_T = inputs.slot_mapping_T
        self._decodes = [_decode_tables(inputs, rows) for rows in _decode_groups(inputs)]
        self._prefills = _prefill_tables(inputs)

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        cache.k.flatten(0, 1).index_copy_(0, self._slot_mapping_T, k_TKH)
        cache.v.flatten(0, 1).index_copy_(0, self._slot_mapping_T, v_TKH)

    def attend(self, cache: LayerCache, q_TNH: Tensor) -> Tensor:
        k_SKH, v_SKH = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
        out_TNH = torch.empty_like(q_TNH)
        for group in self._decodes:
            out_TNH[group.rows] = _attend_decodes(group, k_SKH, v_SKH, q_TNH[group.rows])
        for row in self._prefills:
            out_TNH[row.tokens] = _attend_prefill(row, k_SKH, v_SKH, q_TNH[row.tokens])
        return out_TNH


def _attend_decodes(group: _Decodes, k_SKH: Tensor, v_SKH: Tensor, q_RNH: Tensor) -> Tensor:
    """The G query heads of a kv head stand where SDPA has query positions: K is read once."""
    num_rows, length = group.cached_RL.shape
    num_kv_heads, head_dim = k_SKH.shape[1:]
    cached = group.cached_RL.flatten()
    shape_RLKH = (num_rows, length, num_kv_heads, head_dim)
    out_RKGH = scaled_dot_product_attention(
        q_RNH.view(num_rows, num_kv_heads, -1, head_dim),
        k_SKH.index_select(0, cached).view(shape_RLKH).transpose(1, 2),
        v_SKH.index_select(0, cached).view(shape_RLKH).transpose(1, 2),
        attn_mask=group.mask_R11L,
    )
    return out_RKGH.flatten(1, 2)


def _attend_prefill(row: _Prefill, k_SKH: Tensor, v_SKH: Tensor, q_QNH: Tensor) -> Tensor:
    """G stands where SDPA has the batch, so that K and V are expanded without a copy."""
    num_kv_heads, head_dim = k_SKH.shape[1:]
    q_GKQH = q_QNH.view(len(q_QNH), num_kv_heads, -1, head_dim).permute(2, 1, 0, 3)
    expanded = (len(q_GKQH), -1, -1, -1)
    out_GKQH = scaled_dot_product_attention(
        q_GKQH,
        k_SKH.index_select(0, row.cached_L).transpose(0, 1).expand(expanded),
        v_SKH.index_select(0, row.cached_L).transpose(0, 1).expand(expanded),
        attn_mask=row.mask_QL,
        is_causal=row.mask_QL is None,
    )
    return out_GKQH.permute(2, 1, 0, 3).flatten(1, 2)


def _decode_groups(inputs: PagedInputs) -> Iterator[slice]:
    """Runs of decode rows; a row that is longer than the limit is one of its own."""
    first = longest = 0
    for row, length in enumerate(inputs.context_lens[: inputs.num_decodes]):
        longest = max(longest, length)
        if row > first and (row + 1 - first) * longest > MAX_GATHERED_TOKENS:
            yield slice(first, row)
            first, longest = row, length
    if inputs.num_decodes:
        yield slice(first, inputs.num_decodes)


def _decode_tables(inputs: PagedInputs, rows: slice) -> _Decodes:
    longest = max(inputs.context_lens[rows])
    offsets_L = torch.arange(longest, device=inputs.context_lens_R.device)
    inside_RL = offsets_L < inputs.context_lens_R[rows, None]
    cached_RL = _cache_slots(inputs, rows)[:, :longest]
    cached_RL = cached_RL.where(inside_RL, inputs.slot_mapping_T[rows, None])
    return _Decodes(rows, cached_RL, inside_RL[:, None, None])


def _prefill_tables(inputs: PagedInputs) -> list[_Prefill]:
    prefills = []
    device = inputs.slot_mapping_T.device
    first = inputs.num_decodes
    for row in range(inputs.num_decodes, len(inputs.query_lens)):
        num_tokens, length = inputs.query_lens[row], inputs.context_lens[row]
        tokens = slice(first, first + num_tokens)
        first += num_tokens
        mask_QL = None
        if length > num_tokens:
            mask_QL = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
            mask_QL = mask_QL.tril(length - num_tokens)
        cached_L = _cache_slots(inputs, slice(row, row + 1))[0, :length]
        prefills.append(_Prefill(tokens, cached_L, mask_QL))
    return prefills


def _cache_slots(inputs: PagedInputs, rows: slice) -> Tensor:
    """The slots of all blocks of these rows, in order: [rows, B × block_size]."""
    offsets = torch.arange(inputs.block_size, device=inputs.block_table_RB.device)
    return (inputs.block_table_RB[rows, :, None] * inputs.block_size + offsets).flatten(1)


ATTENTION_BACKENDS: Final[dict[str, Callable[[PagedInputs], Attention]]] = {
    "cpu": GatherAttention,
    "cuda": GatherAttention,
}
"""By torch device type."""
