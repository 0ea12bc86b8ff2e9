"""How published tensors are cut over the tp ranks. Pure arithmetic over ints.

Every rank of a tp group gets the same shapes. What does not divide is padded with zeros at the end
of a rank's part, and a trailing rank may hold padding only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows start..stop of dimension `dim` of a published tensor, held by one rank.

    They fill 0..stop - start of the local tensor; the rest of it, up to `local_size`, is zero.
    `full_size` is the published tensor's own size in that dimension.
    """

    dim: int
    start: int
    stop: int
    local_size: int
    full_size: int


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One rank's attention heads, of all `num_heads` and `num_kv_heads` that are published.

    `q` and `kv` are (start, stop) in published head numbers.
    The local numbers pad the ranges. Local query head i uses local kv head
    i // (num_local_heads // num_local_kv_heads), as in an unsharded layer. Kv ranges of several
    ranks overlap when there are more ranks than kv heads; query ranges never do.
    """

    num_heads: int
    num_kv_heads: int
    num_local_heads: int
    num_local_kv_heads: int
    q: tuple[int, int]
    kv: tuple[int, int]

    def q_rows(self, head_dim: int, dim: int) -> Shard:
        """The cut of a tensor whose dimension `dim` is query heads × head_dim."""
        return _head_rows(self.q, self.num_local_heads, self.num_heads, head_dim, dim)

    def kv_rows(self, head_dim: int, dim: int) -> Shard:
        """The cut of a tensor whose dimension `dim` is kv heads × head_dim."""
        return _head_rows(self.kv, self.num_local_kv_heads, self.num_kv_heads, head_dim, dim)


def _head_rows(
    heads: tuple[int, int], num_local: int, num_all: int, head_dim: int, dim: int
) -> Shard:
    start, stop = heads
    return Shard(dim, start * head_dim, stop * head_dim, num_local * head_dim, num_all * head_dim)


def split_even(total: int, rank: int, size: int, dim: int) -> Shard:
    """ceil(total / size) consecutive rows per rank; trailing ranks get fewer, or none."""
    local_size = -(-total // size)
    start = min(rank * local_size, total)
    return Shard(dim, start, min(start + local_size, total), local_size, total)


def split_heads(num_heads: int, num_kv_heads: int, tp_rank: int, tp_size: int) -> HeadShard:
    """Whole kv heads with their query heads; past `num_kv_heads` ranks, kv heads are replicated.

    ValueError when the query heads do not form groups of one size.
    """
    group_size, rest = divmod(num_heads, num_kv_heads)
    if rest:
        raise ValueError(f"{num_heads} attention heads are no multiple of {num_kv_heads} kv heads")
    if tp_size <= num_kv_heads:
        kv = split_even(num_kv_heads, tp_rank, tp_size, dim=0)
        return HeadShard(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_local_heads=kv.local_size * group_size,
            num_local_kv_heads=kv.local_size,
            q=(kv.start * group_size, kv.stop * group_size),
            kv=(kv.start, kv.stop),
        )
    kv_head = tp_rank * num_kv_heads // tp_size
    # The ranks that share a kv head are consecutive: r is the first when r·kv // tp reaches it.
    first = -(-kv_head * tp_size // num_kv_heads)
    num_sharing = -(-(kv_head + 1) * tp_size // num_kv_heads) - first
    fewest_sharing = tp_size // num_kv_heads
    part = split_even(group_size, tp_rank - first, num_sharing, dim=0)
    return HeadShard(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_local_heads=-(-group_size // fewest_sharing),
        num_local_kv_heads=1,
        q=(kv_head * group_size + part.start, kv_head * group_size + part.stop),
        kv=(kv_head, kv_head + 1),
    )
