"""Which replica gets the next choice. Pure: what is known of the replicas in, an index out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from aioengine.frontend.backlog import Backlog
from aioengine.frontend.prefixes import Prefix, PrefixMemory, prefixes
from aioengine.limits import MAX_REMEMBERED_PREFIXES
from aioengine.messages import LoadStats, ReplicaReady

REQUEST_COST: Final = 64
"""What a request in a replica costs the next one, in prompt tokens: about a short answer."""
FAIR_FACTOR: Final = 4
"""A replica may have so many times what the others have, so that one that answers more slowly,
such as that of the front end's own process, gets its share. But with less than a request for each
of the others, an idle one comes first."""
MAX_FAIR_EXTRA: Final = 16 * REQUEST_COST
"""But at most so much more."""
KEPT_SHARE: Final = 1 - 1 / 128
"""What a choice counts less with every later one, when equals take turns."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one replica is to the next choice."""

    num_requests: int
    """That it has."""
    num_prefill_tokens: int
    """That these have yet to compute before they draw."""
    num_cached_tokens: int = 0
    """Of the choice's prompt: what need not be computed."""
    has_room: bool = True
    """The choice would run at once."""

    @property
    def load(self) -> int:
        """In prompt tokens."""
        return self.num_prefill_tokens + REQUEST_COST * self.num_requests

    @property
    def cost(self) -> int:
        return self.load - self.num_cached_tokens


def choose(candidates: Sequence[Candidate | None], turns: Iterable[int]) -> int | None:
    """The cheapest, or one as good whose turn it is; None when there is none.

    Those where the choice would have to wait are considered only where all are like that. A replica
    costs its load without what the choice has cached there. As good are those that have as much
    cached and no more load than is fair.
    """
    open_ones = {i: candidate for i in turns if (candidate := candidates[i]) is not None}
    if any(candidate.has_room for candidate in open_ones.values()):
        open_ones = {i: candidate for i, candidate in open_ones.items() if candidate.has_room}
    if not open_ones:
        return None
    cheapest = min(open_ones, key=lambda i: open_ones[i].cost)
    total = sum(candidate.load for candidate in open_ones.values())
    num_others = max(len(open_ones) - 1, 1)
    for i, candidate in open_ones.items():
        is_fair = candidate.load <= _fair_load((total - candidate.load) // num_others)
        has_cached = candidate.num_cached_tokens >= open_ones[cheapest].num_cached_tokens
        if i == cheapest or (is_fair and has_cached):
            return i
    raise AssertionError("the cheapest is one of them")


def _fair_load(others: int) -> int:
    """What a replica may have when the others have so much on average."""
    if others < REQUEST_COST:
        return 0
    return min(FAIR_FACTOR * others, others + MAX_FAIR_EXTRA)


@dataclass(slots=True)
class Prompt:
    """What choices of one prompt share while they are placed, one right after the other."""

    num_tokens: int
    chain: list[Prefix]
    num_placed_tokens: Counter[int] = field(default_factory=Counter)
    """What its choices have to compute, by replica. It is not ahead of the next of them: on the
    same replica that one has nothing else to wait for."""


@dataclass(slots=True)
class _Replica:
    backlog: Backlog
    prefixes: PrefixMemory
    cache_epoch: int = 0


class Router:
    """Places choices: the cheapest replica wins; of those as good, the one that got least lately.

    Load is prompt tokens to compute, and REQUEST_COST for each request. So an equal beginning
    attracts as long as it saves more than the greater load costs, and choices of one prompt stay
    together as long as computing it again would cost more.
    """

    def __init__(self, num_replicas: int, first: int) -> None:
        """`first`: who has the first turn; several front ends had better differ."""
        self._replicas: list[_Replica | None] = [None] * num_replicas
        self._turns = [(first + offset) % num_replicas for offset in range(num_replicas)]
        """The order of replicas that got equally much."""
        self._given = [0.0] * num_replicas
        """Choices, the latest of which count most."""
        self._block_size: int | None = None
        """None: nothing is reused, or there is nothing to choose."""

    def open(self, index: int, ready: ReplicaReady) -> None:
        max_prefixes = MAX_REMEMBERED_PREFIXES // len(self._replicas)
        self._replicas[index] = _Replica(Backlog(ready), PrefixMemory(max_prefixes))
        if ready.enable_prefix_caching and len(self._replicas) > 1:
            self._block_size = ready.block_size

    def close(self, index: int) -> None:
        """It takes no more work, and what it had is lost."""
        self._replicas[index] = None

    def reported(self, index: int, stats: LoadStats, num_added: int) -> None:
        """What the leader of a replica says; `num_added` as in StepReport."""
        if (replica := self._replicas[index]) is None:
            return
        replica.backlog.reported(stats, num_added)
        if stats.prefix_cache_epoch != replica.cache_epoch:
            replica.cache_epoch = stats.prefix_cache_epoch
            replica.prefixes.forget_all()

    def ended(self, index: int, request_id: str) -> None:
        if (replica := self._replicas[index]) is not None:
            replica.backlog.ended(request_id)

    def prompt(self, token_ids: Sequence[int], cache_salt: str) -> Prompt:
        """A prompt whose choices are to be placed now."""
        chain = []
        if self._block_size is not None:
            chain = prefixes(token_ids, cache_salt, self._block_size)
        return Prompt(len(token_ids), chain)

    def place(
        self, request_id: str, prompt: Prompt, *, reads_cache: bool = True, pin: int | None = None
    ) -> int:
        """The replica that is to get the choice, which counts there from now on.

        The caller has seen to it that there is one, and that `pin` is open.
        """
        if pin is None:
            indices = range(len(self._replicas))
            candidates = [self.candidate(i, prompt, reads_cache=reads_cache) for i in indices]
            pin = choose(candidates, sorted(self._turns, key=self._given.__getitem__))
            assert pin is not None
        self._given = [KEPT_SHARE * given for given in self._given]
        self._given[pin] += 1
        replica = self._replicas[pin]
        assert replica is not None
        num_cached = replica.prefixes.match(prompt.chain) if reads_cache else 0
        num_tokens = prompt.num_tokens - num_cached
        replica.prefixes.remember(prompt.chain)
        replica.backlog.sent(request_id, num_tokens)
        prompt.num_placed_tokens[pin] += num_tokens
        return pin

    def candidate(
        self, index: int, prompt: Prompt, *, reads_cache: bool = True
    ) -> Candidate | None:
        """What a replica is to the next choice of the prompt; None when it takes no work."""
        if (replica := self._replicas[index]) is None:
            return None
        backlog = replica.backlog
        return Candidate(
            backlog.num_requests,
            backlog.num_prefill_tokens - prompt.num_placed_tokens[index],
            replica.prefixes.match(prompt.chain) if reads_cache else 0,
            backlog.has_room(prompt.num_tokens),
        )
