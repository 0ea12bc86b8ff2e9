"""Log probabilities of given tokens and of the best ones.

Shapes: N rows · V vocabulary.
"""

from collections.abc import Sequence

from torch import Tensor

from aioengine.messages import TokenLogprobs


def describe_tokens(
    logprobs_NV: Tensor, ids_N: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One for each row: its token's log probability and rank, and its `num_top` best tokens."""
    own_N1 = logprobs_NV.gather(1, ids_N[:, None])
    ranks = (logprobs_NV > own_N1).sum(dim=1).add_(1).tolist()
    counts = [min(count, logprobs_NV.shape[1]) for count in num_top]
    top = logprobs_NV.topk(max(counts), dim=1)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)), rank)
        for logprob, rank, count, ids, values in zip(
            own_N1[:, 0].tolist(),
            ranks,
            counts,
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
    ]
