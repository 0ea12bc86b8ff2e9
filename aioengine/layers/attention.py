"""Attention over the paged KV cache, one backend per kind of device.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · L cached tokens · Q tokens of one prefill row.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aioengine.layers.forward_batch import Attention, LayerCache, PagedInputs
from aioengine.layers.prefill import attend_prefill, causal_mask
from aioengine.layers.team import Team

log = logging.getLogger(__name__)

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
            out_TNH[row.tokens] = attend_prefill(
                q_TNH[row.tokens],
                k_SKH.index_select(0, row.cached_L),
                v_SKH.index_select(0, row.cached_L),
                row.mask_QL,
            )
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
        mask_QL = causal_mask(num_tokens, length, device)
        cached_L = _cache_slots(inputs, slice(row, row + 1))[0, :length]
        prefills.append(_Prefill(tokens, cached_L, mask_QL))
    return prefills


def _cache_slots(inputs: PagedInputs, rows: slice) -> Tensor:
    """The slots of all blocks of these rows, in order: [rows, B × block_size]."""
    offsets = torch.arange(inputs.block_size, device=inputs.block_table_RB.device)
    return (inputs.block_table_RB[rows, :, None] * inputs.block_size + offsets).flatten(1)


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """How one kind of device attends: the seam."""

    begin: Callable[[PagedInputs], Attention]
    """For one step."""
    cache_shapes: Callable[[int, int, int, int, torch.dtype], tuple[Shape, Shape]]
    """Of a layer's keys and values, from the numbers of blocks, slots of a block, kv heads and
    head_dim, and their type. `begin` reads and writes these."""


GATHER: Final = AttentionBackend(
    GatherAttention,
    lambda blocks, slots, heads, dim, _: ((blocks, slots, heads, dim), (blocks, slots, heads, dim)),
)


def attention_backend(
    device_type: str, block_size: int, team: Team | None = None
) -> AttentionBackend:
    """`device_type` as torch names it. On CPU compiled kernels, worked by this team, where there is
    one and blocks are of 16, 32, … slots."""
    if device_type != "cpu" or team is None:
        return GATHER
    module = importlib.import_module("aioengine.layers.cpu_attention")
    if block_size % module.VECTOR:
        log.warning(
            "attention without compiled kernels: --block-size %d is no multiple of %d",
            block_size,
            module.VECTOR,
        )
        return GATHER
    return AttentionBackend(module.CpuThreads(team).begin, module.cache_shapes)
