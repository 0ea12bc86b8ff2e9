"""KV blocks of one replica: who holds them, and which can be reused for an equal prefix."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

NULL_BLOCK: Final = 0
"""Padding writes there; it is never handed out."""


def root_digest(cache_salt: str, weight_version: int) -> bytes:
    """Where a chain of block digests starts: prefixes are shared only below an equal root."""
    return hashlib.sha256(f"{weight_version}:{cache_salt}".encode()).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Names a full block by its tokens and, through `parent`, by everything before them."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


class BlockPool:
    """Reference counts, free blocks and the prefix cache, over block ids 1 to num_blocks - 1.

    A block is held (by one or more requests), free and blank, or free and reusable: its content is
    still known by digest and a hit revives it. Blank blocks are handed out first, then the least
    recently freed reusable one, whose content is then forgotten. Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        assert num_blocks > 1
        assert block_size > 0
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_usable = num_blocks - 1
        self.num_resets = 0
        """Times that all content was forgotten."""
        self._num_holders = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._digests: dict[int, bytes] = {}
        self._block_ids: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._reusable)

    @property
    def num_reusable(self) -> int:
        """Free blocks whose content is still known."""
        return len(self._reusable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks with the content of the longest known beginning of a chain; not yet held."""
        block_ids = []
        for digest in digests:
            if (block_id := self._block_ids.get(digest)) is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(not self._num_holders[block_id] for block_id in block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block of a match."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                del self._reusable[block_id]
            self._num_holders[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks with one holder and no content. The caller has checked `num_free`."""
        assert num_blocks <= self.num_free
        return [self._allocate_one() for _ in range(num_blocks)]

    def _allocate_one(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._reusable.popitem(last=False)
            del self._block_ids[self._digests.pop(block_id)]
        self._num_holders[block_id] = 1
        return block_id

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder less for each block of a request, given in the order of its tokens."""
        for block_id in reversed(block_ids):  # the tail is handed out first: prefixes live longest
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            if block_id in self._digests:
                self._reusable[block_id] = None
            else:
                self._blank.append(block_id)

    def register(self, block_id: int, digest: bytes) -> None:
        """Make a held, full block findable. Of equal blocks the first stays the findable one."""
        assert self.enable_prefix_caching
        assert self._num_holders[block_id]
        if digest not in self._block_ids:
            assert block_id not in self._digests
            self._digests[block_id] = digest
            self._block_ids[digest] = block_id

    def forget_content(self) -> None:
        """Empty the prefix cache. Holders keep their blocks."""
        self.num_resets += 1
        self._blank += self._reusable
        self._reusable.clear()
        self._digests.clear()
        self._block_ids.clear()

    def check_invariants(self, num_holders: Mapping[int, int]) -> None:
        """`num_holders` is the count of requests whose table has a block; absent means none."""
        held = {block_id for block_id, count in enumerate(self._num_holders) if count}
        free = [*self._blank, *self._reusable]
        assert {block_id: self._num_holders[block_id] for block_id in held} == dict(num_holders)
        assert len(set(free)) == len(free)
        assert held.isdisjoint(free)
        assert held.union(free) == set(range(1, self.num_usable + 1))
        assert self._digests.keys().isdisjoint(self._blank)
        assert self._digests.keys() >= self._reusable.keys()
        assert {d: b for b, d in self._digests.items()} == self._block_ids
        assert len(self._digests) == len(self._block_ids)
