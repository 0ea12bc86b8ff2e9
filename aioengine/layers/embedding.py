"""Token embedding and vocabulary head, cut over the tp group by vocabulary rows.

Shapes: T tokens · D hidden size · R rows that sample · V vocabulary · W this rank's share of V.
"""

from torch import Tensor
from torch.nn import functional

from aioengine.layers.module import Placement, ShardedModule
from aioengine.layers.partition import split_even


class VocabParallelEmbedding(ShardedModule):
    """Every rank looks up the ids it holds; the group adds up the rest."""

    def __init__(self, vocab_size: int, hidden_size: int, *, place: Placement) -> None:
        super().__init__()
        self.tp = place.tp
        self.shard = split_even(vocab_size, place.tp.rank_in_group, place.tp.world_size, dim=0)
        self.weight = place.empty(self.shard.local_size, hidden_size)
        self.shards = {"weight": self.shard}

    def forward(self, token_ids_T: Tensor) -> Tensor:
        if self.tp.world_size == 1:
            return functional.embedding(token_ids_T, self.weight)
        local_T = token_ids_T - self.shard.start
        elsewhere_T = (local_T < 0) | (local_T >= self.shard.local_size)
        x_TD = functional.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.tp.all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0))


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
        self.weight = tied_to.weight if tied_to else place.empty(shard.local_size, hidden_size)
        self.shards = {"weight": shard}

    def forward(self, hidden_RD: Tensor) -> Tensor:
        """Float32. Padding stands at the end of the joined shares, so cutting removes it."""
        logits_RW = self.backend.logits(hidden_RD, self.weight)
        return self.tp.all_gather(logits_RW, dim=1)[:, : self.vocab_size]
