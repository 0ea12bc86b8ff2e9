"""Attention on CPU: decodes by compiled kernels, in place; prefills by torch's SDPA.

Shapes: T tokens · R rows · N query heads · K kv heads · G = N / K query heads of a kv head ·
H head_dim · L cached tokens · B blocks · Q tokens of one prefill row.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels import attention as kernels
from aioengine.kernels import codegen
from aioengine.layers.forward_batch import LayerCache, PagedInputs
from aioengine.layers.prefill import attend_prefill, causal_mask

KINDS: Final = {
    torch.float32: codegen.FLOAT32,
    torch.bfloat16: codegen.BFLOAT16,
    torch.float16: codegen.FLOAT16,
}
"""What stands for a type in the kernels."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A row with several tokens. `mask_QL` is None when nothing precedes them (plain causal)."""

    tokens: slice
    blocks_B: Tensor
    length: int
    mask_QL: Tensor | None


class CpuAttention:
    """Keys lie as [block, K, H, slot] and values as [block, K, slot, H]; blocks are of a multiple
    of `kernels.VECTOR` slots.

    Nothing beyond a row's own tokens has an influence: what other requests left behind (NaN, even)
    is masked or cut off.
    """

    def __init__(self, inputs: PagedInputs) -> None:
        num_decodes = inputs.num_decodes
        self._block_size = inputs.block_size
        self._slots_T = inputs.slot_mapping_T.numpy()
        self._tables_RB = inputs.block_table_RB.numpy()[:num_decodes]
        self._lengths_R = inputs.context_lens_R.numpy()[:num_decodes]
        self._longest = max(inputs.context_lens[:num_decodes], default=0)
        self._prefills = _prefills(inputs)
        self._scratch = np.empty((0, 0, 0), np.float32)

    def write_kv(self, cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        num_kv, head_dim = k_TKH.shape[1:]
        assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (head_dim, 1)
        kernels.store(
            KINDS[k_TKH.dtype],
            (num_kv, 1, head_dim, self._block_size),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            k_TKH.data_ptr(),
            k_TKH.stride(0),
            v_TKH.data_ptr(),
            v_TKH.stride(0),
            self._slots_T,
        )

    def attend(self, cache: LayerCache, q_TNH: Tensor) -> Tensor:
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        if len(self._lengths_R):
            self._attend_decodes(cache, q_TNH, out_TNH)
        for row in self._prefills:
            k_LKH = cache.k.index_select(0, row.blocks_B).permute(0, 3, 1, 2).flatten(0, 1)
            v_LKH = cache.v.index_select(0, row.blocks_B).transpose(1, 2).flatten(0, 1)
            out_TNH[row.tokens] = attend_prefill(
                q_TNH[row.tokens], k_LKH[: row.length], v_LKH[: row.length], row.mask_QL
            )
        return out_TNH

    def _attend_decodes(self, cache: LayerCache, q_TNH: Tensor, out_TNH: Tensor) -> None:
        num_heads, head_dim = q_TNH.shape[1:]
        num_kv = cache.k.shape[1]
        assert q_TNH.stride()[1:] == (head_dim, 1)
        if not self._scratch.size:  # one for all layers of the step
            room = max(self._longest, head_dim) + 2 * kernels.VECTOR
            self._scratch = np.empty((3, kernels.MAX_HEADS, room), np.float32)
        kernels.attend(
            KINDS[q_TNH.dtype],
            (num_kv, num_heads // num_kv, head_dim, self._block_size),
            q_TNH.data_ptr(),
            q_TNH.stride(0),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            out_TNH.data_ptr(),
            self._tables_RB,
            self._lengths_R,
            head_dim**-0.5 * kernels.LOG2_E,
            self._scratch,
        )


def _prefills(inputs: PagedInputs) -> list[_Prefill]:
    prefills = []
    first = inputs.num_decodes
    for row in range(inputs.num_decodes, len(inputs.query_lens)):
        num_tokens, length = inputs.query_lens[row], inputs.context_lens[row]
        tokens = slice(first, first + num_tokens)
        first += num_tokens
        blocks_B = inputs.block_table_RB[row, : -(-length // inputs.block_size)]
        mask_QL = causal_mask(num_tokens, length, blocks_B.device)
        prefills.append(_Prefill(tokens, blocks_B, length, mask_QL))
    return prefills
