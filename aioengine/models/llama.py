"""Llama and everything built like it (SmolLM2, TinyLlama, …): one pipeline stage of it.

Modules carry the names of Hugging Face checkpoints and global layer numbers, so the parameters'
names are the published ones.

Shapes: T tokens · D hidden size · N query heads · K kv heads · H head_dim · R rows that sample ·
V vocabulary. N and K count this rank's heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.embedding import LMHead, VocabParallelEmbedding
from aioengine.layers.forward_batch import ForwardBatch, LayerCache
from aioengine.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioengine.layers.module import Placement, ShardedModule
from aioengine.layers.norm import RMSNorm
from aioengine.layers.partition import Shard, split_even, split_heads
from aioengine.layers.rotary import RotaryEmbedding, rotate
from aioengine.model_config import ModelConfig


class LlamaAttention(nn.Module):
    def __init__(self, cfg: ModelConfig, place: Placement) -> None:
        super().__init__()
        heads = split_heads(cfg.num_heads, cfg.num_kv_heads, place.tp.rank_in_group, place.tp.size)
        self.q_shape = (-1, heads.num_local_heads, cfg.head_dim)
        self.kv_shape = (-1, heads.num_local_kv_heads, cfg.head_dim)
        q = heads.q_rows(cfg.head_dim, dim=0)
        kv = heads.kv_rows(cfg.head_dim, dim=0)
        bias = cfg.attention_bias
        self.q_proj = ColumnParallelLinear(cfg.hidden_size, q, bias=bias, place=place)
        self.k_proj = ColumnParallelLinear(cfg.hidden_size, kv, bias=bias, place=place)
        self.v_proj = ColumnParallelLinear(cfg.hidden_size, kv, bias=bias, place=place)
        self.o_proj = RowParallelLinear(
            heads.q_rows(cfg.head_dim, dim=1),
            cfg.hidden_size,
            bias=cfg.attention_out_bias,
            place=place,
        )

    def forward(
        self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        q_TNH = rotate(self.q_proj(x_TD).view(self.q_shape), *rotary)
        k_TKH = rotate(self.k_proj(x_TD).view(self.kv_shape), *rotary)
        v_TKH = self.v_proj(x_TD).view(self.kv_shape)
        batch.attention.write_kv(cache, k_TKH, v_TKH)
        out_TNH = batch.attention.attend(cache, q_TNH)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(1, 2))
        return out_TD


class LlamaMLP(nn.Module):
    def __init__(self, cfg: ModelConfig, place: Placement) -> None:
        super().__init__()
        tp, size, bias = place.tp, cfg.intermediate_size, cfg.mlp_bias
        columns = split_even(size, tp.rank_in_group, tp.size, dim=0)
        rows = split_even(size, tp.rank_in_group, tp.size, dim=1)
        self.gate_proj = ColumnParallelLinear(cfg.hidden_size, columns, bias=bias, place=place)
        self.up_proj = ColumnParallelLinear(cfg.hidden_size, columns, bias=bias, place=place)
        self.down_proj = RowParallelLinear(rows, cfg.hidden_size, bias=bias, place=place)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(functional.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
        return out_TD


class LlamaLayer(nn.Module):
    def __init__(self, cfg: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, place=place)
        self.self_attn = LlamaAttention(cfg, place)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, place=place)
        self.mlp = LlamaMLP(cfg, place)

    def forward(
        self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotary, batch, cache)
        out_TD: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out_TD


class LlamaDecoder(nn.Module):
    """The part that checkpoints call `model`."""

    def __init__(
        self, cfg: ModelConfig, layers: range, *, is_first: bool, is_last: bool, place: Placement
    ) -> None:
        super().__init__()
        self.embed_tokens = (
            VocabParallelEmbedding(cfg.vocab_size, cfg.hidden_size, place=place)
            if is_first
            else None
        )
        self.layers = nn.ModuleDict({str(i): LlamaLayer(cfg, place) for i in layers})
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, place=place) if is_last else None
        self.rotary = RotaryEmbedding(cfg.rope, cfg.head_dim, device=place.device)

    def forward(self, batch: ForwardBatch, hidden_TD: Tensor | None) -> Tensor:
        if self.embed_tokens is not None:
            hidden_TD = self.embed_tokens(batch.token_ids_T)
        assert hidden_TD is not None
        rotary = self.rotary(batch.positions_T, hidden_TD.dtype)
        for number, layer in self.layers.items():
            hidden_TD = layer(hidden_TD, rotary, batch, batch.kv_caches[int(number)])
        return hidden_TD


class LlamaStage(nn.Module):
    """The layers `layers` (global numbers); the embedding if first, norm and head if last.

    A single stage with tied embeddings has one parameter, `model.embed_tokens.weight`, for both.
    With several, the last stage has a `lm_head.weight` of its own, to be filled from
    `model.embed_tokens.weight`.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        tp: GroupCoordinator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        place = Placement(tp, dtype, device)
        self.model = LlamaDecoder(cfg, layers, is_first=is_first, is_last=is_last, place=place)
        self.lm_head = LMHead(cfg.vocab_size, cfg.hidden_size, place=place) if is_last else None
        if cfg.tie_word_embeddings and self.lm_head and self.model.embed_tokens:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: ForwardBatch, hidden_TD: Tensor | None) -> Tensor:
        """Hidden states after this stage's layers. `hidden_TD` is None on the first stage."""
        out_TD: Tensor = self.model(batch, hidden_TD)
        return out_TD

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, V]; last stage only, entered by its whole tp group."""
        assert self.model.norm is not None
        assert self.lm_head is not None
        logits_RV: Tensor = self.lm_head(self.model.norm(hidden_RD))
        return logits_RV

    def shards(self) -> dict[str, Shard]:
        """What the loader must put into each parameter, by its full name. Each parameter once."""
        held = {
            f"{prefix}.{name}": shard
            for prefix, module in self.named_modules()
            if isinstance(module, ShardedModule)
            for name, shard in module.shards.items()
        }
        return {name: held[name] for name, _ in self.named_parameters()}
