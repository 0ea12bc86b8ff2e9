"""Log probabilities of given tokens and of the best ones.

Shapes: N rows · V vocabulary · K best tokens, as many as the row that wants most of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from aioengine.messages import TokenLogprobs

TABLE_TENSORS: Final = 4
"""Of one TokenTable."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What is to be said about one token per row, still on the device."""

    logprobs_N: Tensor
    ranks_N: Tensor
    best_ids_NK: Tensor
    best_logprobs_NK: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which `describe` takes them from the host."""
        return self.logprobs_N, self.ranks_N, self.best_ids_NK, self.best_logprobs_NK


def tabulate(logprobs_NV: Tensor, ids_N: Tensor, num_top: Sequence[int]) -> TokenTable:
    """Each row's token: its log probability and rank, and the row's best tokens."""
    own_N1 = logprobs_NV.gather(1, ids_N[:, None])
    best = logprobs_NV.topk(min(max(num_top), logprobs_NV.shape[1]), dim=1)
    ranks_N = (logprobs_NV > own_N1).sum(dim=1).add_(1)
    return TokenTable(own_N1[:, 0], ranks_N, best.indices, best.values)


def describe(on_host: Sequence[Tensor], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """A table's tensors as messages; each row gets the `num_top` best tokens that it wants."""
    logprobs_N, ranks_N, best_ids_NK, best_logprobs_NK = (tensor.tolist() for tensor in on_host)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)), rank)
        for logprob, rank, count, ids, values in zip(
            logprobs_N, ranks_N, num_top, best_ids_NK, best_logprobs_NK, strict=True
        )
    ]
