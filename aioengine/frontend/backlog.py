"""What one replica has to do before and beside the next request. Pure."""

from collections import OrderedDict

from aioengine.messages import LoadStats, ReplicaReady


class Backlog:
    """What its leader said last, of all front ends, and what this front end has sent it since."""

    def __init__(self, ready: ReplicaReady) -> None:
        self._block_size = ready.block_size
        self._num_slots = ready.num_slots
        self._stats = LoadStats(num_free_blocks=ready.num_blocks)
        self._num_sent = 0
        self._unseen: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By request id, in the order sent: its number, and what it has to compute."""
        self._num_unseen_tokens = 0

    @property
    def num_requests(self) -> int:
        return self._stats.num_running + self._stats.num_waiting + len(self._unseen)

    @property
    def num_prefill_tokens(self) -> int:
        """To compute before all of these requests have drawn a token."""
        return self._stats.num_prefill_tokens + self._num_unseen_tokens

    def has_room(self, num_prompt_tokens: int) -> bool:
        """Whether a request would run at once: there is a slot, and KV blocks even if no block of
        its prompt is shared."""
        num_tokens = self.num_prefill_tokens + num_prompt_tokens
        num_entering = self._stats.num_waiting + len(self._unseen) + 1  # each fills no block
        num_blocks = num_tokens // self._block_size + num_entering
        has_slot = self.num_requests < self._num_slots
        return has_slot and num_blocks <= self._stats.num_free_blocks

    def sent(self, request_id: str, num_prefill_tokens: int) -> None:
        self._num_sent += 1
        self._unseen[request_id] = self._num_sent, num_prefill_tokens
        self._num_unseen_tokens += num_prefill_tokens

    def ended(self, request_id: str) -> None:
        """Perhaps before the leader saw it."""
        if (unseen := self._unseen.pop(request_id, None)) is not None:
            self._num_unseen_tokens -= unseen[1]

    def reported(self, stats: LoadStats, num_added: int) -> None:
        """`stats` hold the first `num_added` requests of this front end, as far as they live."""
        self._stats = stats
        while self._unseen and next(iter(self._unseen.values()))[0] <= num_added:
            _, (_, num_tokens) = self._unseen.popitem(last=False)
            self._num_unseen_tokens -= num_tokens
