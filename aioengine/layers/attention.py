"""Attention over the paged KV cache, one backend per kind of device.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · L cached tokens · Q tokens of one prefill row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aioengine.layers.forward_batch import Attention, LayerCache, PagedInputs


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
        self._num_decodes = inputs.num_decodes
        if self._num_decodes:
            self._decode_cached_RL, self._decode_mask_R11L = _decode_tables(inputs)
        self._prefills = _prefill_tables(inputs)

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        cache.k.flatten(0, 1).index_copy_(0, self._slot_mapping_T, k_TKH)
        cache.v.flatten(0, 1).index_copy_(0, self._slot_mapping_T, v_TKH)

    def attend(self, cache: LayerCache, q_TNH: Tensor) -> Tensor:
        k_SKH, v_SKH = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
        out_TNH = torch.empty_like(q_TNH)
        if self._num_decodes:
            out_TNH[: self._num_decodes] = self._attend_decodes(
                k_SKH, v_SKH, q_TNH[: self._num_decodes]
            )
        for row in self._prefills:
            out_TNH[row.tokens] = _attend_prefill(row, k_SKH, v_SKH, q_TNH[row.tokens])
        return out_TNH

    def _attend_decodes(self, k_SKH: Tensor, v_SKH: Tensor, q_RNH: Tensor) -> Tensor:
        """The G query heads of a kv head stand where SDPA has query positions: K is read once."""
        num_rows, length = self._decode_cached_RL.shape
        num_kv_heads, head_dim = k_SKH.shape[1:]
        cached = self._decode_cached_RL.flatten()
        shape_RLKH = (num_rows, length, num_kv_heads, head_dim)
        out_RKGH = scaled_dot_product_attention(
            q_RNH.view(num_rows, num_kv_heads, -1, head_dim),
            k_SKH.index_select(0, cached).view(shape_RLKH).transpose(1, 2),
            v_SKH.index_select(0, cached).view(shape_RLKH).transpose(1, 2),
            attn_mask=self._decode_mask_R11L,
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


def _decode_tables(inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Cache slots [R, L] of the decode rows, and their mask [R, 1, 1, L]."""
    num = inputs.num_decodes
    longest = max(inputs.context_lens[:num])
    offsets_L = torch.arange(longest, device=inputs.context_lens_R.device)
    inside_RL = offsets_L < inputs.context_lens_R[:num, None]
    cached_RL = _cache_slots(inputs, slice(num))[:, :longest]
    cached_RL = cached_RL.where(inside_RL, inputs.slot_mapping_T[:num, None])
    return cached_RL, inside_RL[:, None, None]


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
