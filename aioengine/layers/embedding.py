"""Token embedding and vocabulary head, cut over the tp group by vocabulary rows.

Shapes: T tokens · D hidden size · R rows that sample · V vocabulary · W this rank's share of V.
"""

import torch
from torch import Tensor, nn

from aioengine.layers.module import Placement, ShardedModule
from aioengine.layers.partition import split_even
from aioengine.layers.quantized import PackedParameter


class VocabParallelEmbedding(ShardedModule):
    """Every rank looks up the ids it holds; the group adds up the rest."""

    def __init__(self, vocab_size: int, hidden_size: int, *, place: Placement) -> None:
        super().__init__()
        self.tp = place.tp
        self.embed = place.backend.embed
        self.shard = split_even(vocab_size, place.tp.rank_in_group, place.tp.world_size, dim=0)
        self.weight = place.matrix(self.shard.local_size, hidden_size)
        self.dtype = place.dtype
        self.shards = {"weight": self.shard}

    def forward(self, token_ids_T: Tensor) -> Tensor:
        first = None if self.tp.world_size == 1 else self.shard.start
        return self.tp.all_reduce(self.embed(token_ids_T, self.weight, first, self.dtype))


class LMHead(ShardedModule):
    """Logits over the published vocabulary, equal on all ranks of the tp group.

    Shares the weight of the embedding that it is `tied_to`.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        place: Placement,
    ) -> None:
        super().__init__()
        self.tp = place.tp
        self.vocab_size = vocab_size
        self.backend = place.backend
        shard = split_even(vocab_size, place.tp.rank_in_group, place.tp.world_size, dim=0)
        self.weight: nn.Parameter = (
            tied_to.weight if tied_to else place.matrix(shard.local_size, hidden_size)
        )
        self.shards = {"weight": shard}

    def forward(self, hidden_RD: Tensor) -> Tensor:
        """Float32. Padding stands at the end of the joined shares, so cutting removes it."""
        if isinstance(self.weight, PackedParameter):
            logits_RW = self.backend.quantized_linear(hidden_RD, self.weight, torch.float32)
        else:
            logits_RW = self.backend.logits(hidden_RD, self.weight)
        return self.tp.all_gather(logits_RW, dim=1)[:, : self.vocab_size]
