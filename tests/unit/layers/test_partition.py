"""Every published row is held exactly once (kv heads at least once), in equal local shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.layers.partition import split_even, split_heads

sizes = st.integers(1, 12)


@given(total=st.integers(1, 200), size=sizes)
def test_split_even_covers_each_row_once(total: int, size: int) -> None:
    shards = [split_even(total, rank, size, dim=1) for rank in range(size)]
    rows = [row for shard in shards for row in range(shard.start, shard.stop)]
    assert rows == list(range(total))
    assert len({shard.local_size for shard in shards}) == 1
    assert all(0 <= shard.stop - shard.start <= shard.local_size for shard in shards)


@given(num_kv_heads=sizes, group_size=sizes, tp_size=st.integers(1, 40))
def test_split_heads_covers_each_head(num_kv_heads: int, group_size: int, tp_size: int) -> None:
    num_heads = num_kv_heads * group_size
    shards = [split_heads(num_heads, num_kv_heads, rank, tp_size) for rank in range(tp_size)]
    q_heads = [head for shard in shards for head in range(*shard.q)]
    assert q_heads == list(range(num_heads))
    assert {head for shard in shards for head in range(*shard.kv)} == set(range(num_kv_heads))
    assert len({(shard.num_local_heads, shard.num_local_kv_heads) for shard in shards}) == 1
    for shard in shards:
        assert shard.q[1] - shard.q[0] <= shard.num_local_heads
        assert shard.kv[1] - shard.kv[0] <= shard.num_local_kv_heads
        local_group, rest = divmod(shard.num_local_heads, shard.num_local_kv_heads)
        assert rest == 0
        for local, head in enumerate(range(*shard.q)):
            assert shard.kv[0] + local // local_group == head // group_size


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size", "expected"),
    [
        (9, 3, 2, [(6, 2, (0, 6), (0, 2)), (6, 2, (6, 9), (2, 3))]),
        (8, 4, 4, [(2, 1, (2 * r, 2 * r + 2), (r, r + 1)) for r in range(4)]),
        (
            8,
            4,
            5,
            [
                (2, 1, (0, 1), (0, 1)),
                (2, 1, (1, 2), (0, 1)),
                (2, 1, (2, 4), (1, 2)),
                (2, 1, (4, 6), (2, 3)),
                (2, 1, (6, 8), (3, 4)),
            ],
        ),
    ],
)
def test_split_heads_by_hand(
    num_heads: int, num_kv_heads: int, tp_size: int, expected: list[tuple[object, ...]]
) -> None:
    shards = [split_heads(num_heads, num_kv_heads, rank, tp_size) for rank in range(tp_size)]
    assert [(s.num_local_heads, s.num_local_kv_heads, s.q, s.kv) for s in shards] == expected


def test_split_heads_refuses_uneven_groups() -> None:
    with pytest.raises(ValueError, match="9 attention heads"):
        split_heads(9, 2, 0, 1)
