"""Which beginnings of prompts a replica got, so that equal ones can follow. Pure."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from aioengine.limits import MAX_COMPARED_PROMPT_TOKENS

MIN_PREFIX_TOKENS: Final = 64
"""Shorter ones are cheaper to compute again than to look for."""
DIGEST_BYTES: Final = 16

Prefix = tuple[int, bytes]
"""Number of tokens, and what names them."""


def prefixes(token_ids: Sequence[int], cache_salt: str, block_size: int) -> list[Prefix]:
    """Beginnings of a prompt, shortest first, in whole blocks. Equal names: equal tokens and salt.

    A prompt is cut in steps of at least MIN_PREFIX_TOKENS that grow to an eighth of what lies
    before them: a long prompt has some dozens, and a common beginning is found but for an eighth.
    """
    step = -(-MIN_PREFIX_TOKENS // block_size) * block_size
    tokens = memoryview(array("I", token_ids[:MAX_COMPARED_PROMPT_TOKENS]))
    chain = hashlib.sha256(hashlib.sha256(cache_salt.encode()).digest())
    found: list[Prefix] = []
    start = 0
    for end in _ends(step):
        if end > len(tokens):
            break
        chain.update(tokens[start:end])
        found.append((end, chain.copy().digest()[:DIGEST_BYTES]))
        start = end
    return found


def _ends(step: int) -> Iterator[int]:
    """Where prompts are cut."""
    count = 1
    while True:
        yield count * step
        count += 1 << max(count.bit_length() - 4, 0)


class PrefixMemory:
    """What one replica got. Past `max_prefixes` the least recently used are forgotten, of one
    prompt the longest first."""

    def __init__(self, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        self._names: OrderedDict[bytes, None] = OrderedDict()
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._names)

    def match(self, chain: Sequence[Prefix]) -> int:
        """Tokens of the longest beginning that is known."""
        num_tokens = 0
        for end, name in chain:
            if name not in self._names:
                break
            num_tokens = end
        return num_tokens

    def remember(self, chain: Sequence[Prefix]) -> None:
        for _, name in reversed(chain):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._max_prefixes:
            self._names.popitem(last=False)

    def forget_all(self) -> None:
        self._names.clear()
