"""Names of beginnings of prompts, and how long they are remembered."""

import sys
import time
from itertools import pairwise

import pytest

from aioengine.frontend.prefixes import MIN_PREFIX_TOKENS, PrefixMemory, prefixes
from aioengine.limits import MAX_COMPARED_PROMPT_TOKENS


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


@pytest.mark.parametrize(("block_size", "step"), [(1, 64), (16, 64), (48, 96), (1024, 1024)])
def test_cuts_are_whole_blocks(block_size: int, step: int) -> None:
    ends = [end for end, _ in prefixes(tokens(20_000), "", block_size)]
    assert ends[:3] == [step, 2 * step, 3 * step]
    assert ends == sorted(set(ends))
    assert all(end % block_size == 0 for end in ends)
    assert prefixes(tokens(step - 1), "", block_size) == []


def test_steps_grow_to_an_eighth() -> None:
    """Whatever two prompts share, the cut before it is not far away."""
    chain = prefixes(tokens(MAX_COMPARED_PROMPT_TOKENS), "", 16)
    ends = [0, *(end for end, _ in chain)]
    assert ends[-1] == MAX_COMPARED_PROMPT_TOKENS
    assert len(ends) < 60
    for end, after in pairwise(ends):
        assert after - end <= max(MIN_PREFIX_TOKENS, end / 8)


def test_names_tell_tokens_and_salt_and_what_comes_before() -> None:
    chains = [
        prefixes(tokens(200), "", 16),
        prefixes(tokens(200), "salt", 16),
        prefixes((7, *tokens(200)[1:]), "", 16),
    ]
    names = [name for chain in chains for _, name in chain]
    assert len(set(names)) == len(names) == 9
    longer = prefixes(tokens(300), "", 16)
    assert longer[:3] == prefixes(tokens(200), "", 16)


def test_no_more_than_the_limit_is_looked_at() -> None:
    count = MAX_COMPARED_PROMPT_TOKENS
    assert prefixes(tokens(2 * count), "", 16) == prefixes(tokens(count), "", 16)


def test_a_prompt_of_8192_tokens_costs_far_less_than_a_millisecond() -> None:
    """Of the event loop. The best of many, for a machine with neighbours."""
    prompt, times = tokens(8192, first=40_000), []
    for _ in range(50):
        started = time.thread_time()
        prefixes(prompt, "", 16)
        times.append(time.thread_time() - started)
    assert min(times) < 0.5e-3


def test_the_longest_known_beginning_counts() -> None:
    memory = PrefixMemory(100)
    shared = tokens(130)
    memory.remember(prefixes(shared + tokens(100, 500), "", 16))
    assert memory.match(prefixes(shared + tokens(100, 900), "", 16)) == 128
    assert memory.match(prefixes(shared + tokens(100, 500), "", 16)) == 192
    assert memory.match(prefixes(tokens(100, 1), "", 16)) == 0
    assert memory.match(prefixes(shared, "salt", 16)) == 0
    memory.forget_all()
    assert memory.match(prefixes(shared, "", 16)) == 0


def test_the_least_recently_used_end_is_forgotten_first() -> None:
    memory = PrefixMemory(4)
    old, new = prefixes(tokens(192), "", 16), prefixes(tokens(192, 1000), "", 16)
    memory.remember(old)
    memory.remember(new)
    assert len(memory) == 4
    assert (memory.match(old), memory.match(new)) == (64, 192)
    memory.remember(old[:1])
    memory.remember(prefixes(tokens(64, 2000), "", 16))
    assert (memory.match(old), memory.match(new)) == (64, 128)


def test_memory_is_bounded() -> None:
    memory = PrefixMemory(1000)
    for first in range(200):
        memory.remember(prefixes(tokens(8192, first * 10_000), "", 16))
    assert len(memory) == 1000
    assert sys.getsizeof(memory._names) < 250 * 1000
