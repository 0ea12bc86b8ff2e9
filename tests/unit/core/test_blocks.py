from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioengine.core.blocks import NULL_BLOCK, BlockPool, block_digest, root_digest


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, block_size=4, enable_prefix_caching=True)


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def fill(pool: BlockPool, *names: str) -> list[int]:
    """Blocks of a request that is done with them, reusable by these digests."""
    block_ids = pool.allocate(len(names))
    for block_id, digest in zip(block_ids, chain(*names), strict=True):
        pool.register(block_id, digest)
    pool.free(block_ids)
    return block_ids


def test_null_block_is_never_handed_out() -> None:
    pool = make_pool(4)
    assert NULL_BLOCK not in pool.allocate(3)
    assert pool.num_free == 0


def test_a_hit_revives_a_free_block() -> None:
    pool = make_pool(4)
    block_ids = fill(pool, "a", "b")
    assert pool.num_reusable == 2
    assert pool.match(chain("a", "b", "c")) == block_ids
    assert pool.num_free_among(block_ids) == 2
    pool.hold(block_ids)
    pool.hold(block_ids)
    assert (pool.num_free, pool.num_reusable, pool.num_free_among(block_ids)) == (1, 0, 0)
    pool.free(block_ids)
    pool.check_invariants(Counter(block_ids))


def test_match_ends_at_the_first_unknown_block() -> None:
    pool = make_pool(4)
    block_ids = fill(pool, "a", "b", "c")
    assert pool.match(chain("a", "x", "c")) == block_ids[:1]
    assert pool.match(chain("x", "b")) == []


def test_blank_blocks_go_first_then_the_tail_of_the_least_recent_chain() -> None:
    pool = make_pool(6)
    old, new = fill(pool, "a", "b"), fill(pool, "c", "d")
    (blank,) = pool.allocate(1)
    assert blank not in old + new
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.match(chain("a", "b")) == []
    assert pool.match(chain("c", "d")) == new[:1]


def test_of_equal_blocks_the_first_stays_findable() -> None:
    pool = make_pool(4)
    (first,) = fill(pool, "a")
    second = pool.allocate(1)
    pool.register(second[0], b"a")
    assert pool.match(chain("a")) == [first]
    pool.free(second)
    assert pool.num_reusable == 1


def test_forgotten_content_is_not_found() -> None:
    pool = make_pool(4)
    fill(pool, "a", "b")
    pool.forget_content()
    assert pool.match(chain("a")) == []
    assert (pool.num_free, pool.num_reusable) == (3, 0)
    pool.check_invariants({})


def test_digests_tell_salt_version_and_history_apart() -> None:
    roots = {root_digest(salt, version) for salt in ("", "s") for version in (0, 1)}
    assert len(roots) == 4
    digests = {block_digest(root, ids) for root in roots for ids in ((1, 2), (2, 1), (258,))}
    assert len(digests) == 12


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests with one-letter blocks come and go; a letter stands for a digest."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(8)
        self.held: list[list[int]] = []

    @rule(word=st.text("ab", min_size=1, max_size=4))
    def enter(self, word: str) -> None:
        digests = chain(*(word[: i + 1] for i in range(len(word))))
        hits = self.pool.match(digests)
        if len(word) - len(hits) + self.pool.num_free_among(hits) > self.pool.num_free:
            return
        self.pool.hold(hits)
        block_ids = hits + self.pool.allocate(len(word) - len(hits))
        for block_id, digest in zip(block_ids[len(hits) :], digests[len(hits) :], strict=True):
            self.pool.register(block_id, digest)
        assert self.pool.match(digests) == block_ids
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.forget_content()

    @invariant()
    def holds(self) -> None:
        self.pool.check_invariants(Counter(b for block_ids in self.held for b in block_ids))


BlockPoolMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
TestBlockPool = BlockPoolMachine.TestCase
