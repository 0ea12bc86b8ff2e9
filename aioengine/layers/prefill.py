"""Attention of one row with several tokens by torch's SDPA, over keys and values that lie together.

Shapes: N query heads · K kv heads · G = N / K · H head_dim · L cached tokens · Q tokens of the row.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_prefill(q_QNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, mask_QL: Tensor | None) -> Tensor:
    """[Q, N, H]. G stands where SDPA has the batch, so that K and V are expanded without a copy."""
    num_kv_heads, head_dim = k_LKH.shape[1:]
    q_GKQH = q_QNH.view(len(q_QNH), num_kv_heads, -1, head_dim).permute(2, 1, 0, 3)
    expanded = (len(q_GKQH), -1, -1, -1)
    out_GKQH = scaled_dot_product_attention(
        q_GKQH,
        k_LKH.transpose(0, 1).expand(expanded),
        v_LKH.transpose(0, 1).expand(expanded),
        attn_mask=mask_QL,
        is_causal=mask_QL is None,
    )
    return out_GKQH.permute(2, 1, 0, 3).flatten(1, 2)


def causal_mask(num_tokens: int, length: int, device: torch.device) -> Tensor | None:
    """Of the last `num_tokens` of `length`, [Q, L]; None when nothing precedes them (plain
    causal)."""
    if length == num_tokens:
        return None
    mask_QL = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
    return mask_QL.tril(length - num_tokens)
