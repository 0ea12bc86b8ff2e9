"""Llama and everything built like it (SmolLM2, TinyLlama, …): one pipeline stage of it.

Modules carry the names of Hugging Face checkpoints and global layer numbers, so the parameters'
names are the published ones.

Shapes: T tokens · D hidden size · N query heads · K kv heads · H head_dim · R rows that sample ·
V vocabulary · M = N + 2·K. N and K count this rank's heads.
"""

from torch import Tensor, nn

from aioengine.layers.embedding import LMHead, VocabParallelEmbedding
from aioengine.layers.forward_batch import ForwardBatch, LayerCache
from aioengine.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioengine.layers.module import Placement, ShardedModule
from aioengine.layers.norm import RMSNorm
from aioengine.layers.partition import Shard, split_even, split_heads
from aioengine.layers.rotary import RotaryEmbedding
from aioengine.model_config import ModelConfig


class LlamaAttention(nn.Module):
    def __init__(self, cfg: ModelConfig, place: Placement) -> None:
        super().__init__()
        heads = split_heads(
            cfg.num_heads, cfg.num_kv_heads, place.tp.rank_in_group, place.tp.world_size
        )
        self.head_dim = cfg.head_dim
        self.num_heads = (heads.num_local_heads, heads.num_local_kv_heads, heads.num_local_kv_heads)
        self.rotate = place.backend.rotate
        q = heads.q_rows(cfg.head_dim, dim=0)
        kv = heads.kv_rows(cfg.head_dim, dim=0)
        self.qkv_proj = ColumnParallelLinear(
            cfg.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            bias=cfg.attention_bias,
            place=place,
        )
        self.q_proj, self.k_proj, self.v_proj = self.qkv_proj.parts
        self.o_proj = RowParallelLinear(
            heads.q_rows(cfg.head_dim, dim=1),
            cfg.hidden_size,
            bias=cfg.attention_out_bias,
            place=place.within("o_proj"),
        )

    def forward(
        self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        qkv_TMH = self.qkv_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        self.rotate(qkv_TMH[:, : -self.num_heads[2]], *rotary)
        q_TNH, k_TKH, v_TKH = qkv_TMH.split_with_sizes(self.num_heads, dim=1)
        batch.attention.write_kv(cache, k_TKH, v_TKH)
        out_TNH = batch.attention.attend(cache, q_TNH)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(1, 2))
        return out_TD


class LlamaMLP(nn.Module):
    def __init__(self, cfg: ModelConfig, place: Placement) -> None:
        super().__init__()
        tp, size, bias = place.tp, cfg.intermediate_size, cfg.mlp_bias
        columns = split_even(size, tp.rank_in_group, tp.world_size, dim=0)
        rows = split_even(size, tp.rank_in_group, tp.world_size, dim=1)
        self.silu_mul = place.backend.silu_mul
        self.gate_up_proj = ColumnParallelLinear(
            cfg.hidden_size, {"gate_proj": columns, "up_proj": columns}, bias=bias, place=place
        )
        self.gate_proj, self.up_proj = self.gate_up_proj.parts
        self.down_proj = RowParallelLinear(
            rows, cfg.hidden_size, bias=bias, place=place.within("down_proj")
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(self.silu_mul(self.gate_up_proj(x_TD)))
        return out_TD


class LlamaLayer(nn.Module):
    def __init__(self, cfg: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, place=place)
        self.self_attn = LlamaAttention(cfg, place.within("self_attn"))
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, place=place)
        self.mlp = LlamaMLP(cfg, place.within("mlp"))

    def forward(
        self,
        hidden_TD: Tensor,
        update_TD: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """What the layer before left to add, `update_TD`, joins this layer's first norm; and so on.
        Returns hidden states and their update."""
        hidden_TD, x_TD = self.input_layernorm.add(hidden_TD, update_TD)
        x_TD = self.self_attn(x_TD, rotary, batch, cache)
        hidden_TD, x_TD = self.post_attention_layernorm.add(hidden_TD, x_TD)
        return hidden_TD, self.mlp(x_TD)


class LlamaDecoder(nn.Module):
    """The part that checkpoints call `model`."""

    def __init__(
        self, cfg: ModelConfig, layers: range, *, is_first: bool, is_last: bool, place: Placement
    ) -> None:
        super().__init__()
        self.embed_tokens = (
            VocabParallelEmbedding(
                cfg.vocab_size, cfg.hidden_size, place=place.within("embed_tokens")
            )
            if is_first
            else None
        )
        self.layers = nn.ModuleDict(
            {str(i): LlamaLayer(cfg, place.within(f"layers.{i}")) for i in layers}
        )
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, place=place) if is_last else None
        self.rotary = RotaryEmbedding(cfg.rope, cfg.head_dim, place=place)
        self.add = place.backend.add

    def forward(self, batch: ForwardBatch, hidden_TD: Tensor | None) -> Tensor:
        if self.embed_tokens is not None:
            hidden_TD = self.embed_tokens(batch.token_ids_T)
        assert hidden_TD is not None
        rotary = self.rotary(batch.positions_T, hidden_TD.dtype)
        update_TD = None
        for number, layer in self.layers.items():
            cache = batch.kv_caches[int(number)]
            hidden_TD, update_TD = layer(hidden_TD, update_TD, rotary, batch, cache)
        assert hidden_TD is not None
        return hidden_TD if update_TD is None else self.add(hidden_TD, update_TD)


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
        place: Placement,
    ) -> None:
        super().__init__()
        self.model = LlamaDecoder(
            cfg, layers, is_first=is_first, is_last=is_last, place=place.within("model")
        )
        tied_to = self.model.embed_tokens if cfg.tie_word_embeddings else None
        self.lm_head = (
            LMHead(cfg.vocab_size, cfg.hidden_size, tied_to=tied_to, place=place.within("lm_head"))
            if is_last
            else None
        )

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
