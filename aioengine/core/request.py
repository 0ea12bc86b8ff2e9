"""The leader's state of one request."""

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field

from aioengine.core.blocks import block_digest
from aioengine.messages import AddRequest, FinishReason, SlotParams, TokenLogprobs

Key = tuple[str, str]
"""(source, request_id): ids are unique per front end only."""

Order = tuple[int, int]
"""(priority, arrival): unique, the lower the better."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Changed only by the scheduler. Waiting without a slot, running with one."""

    source: str
    """The front end that added it."""
    added: AddRequest
    order: Order
    digests: list[bytes]
    """The root, then one per full block of `token_ids`, as far as anyone asked."""
    max_model_len: InitVar[int]
    max_num_tokens: int = field(init=False)
    """Prompt and output together never get longer. That is the context; a prompt that fills it gets
    the one draw that every prompt ends in, which is never computed."""
    token_ids: list[int] = field(init=False)
    """Prompt and known output."""
    num_prompt_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)
    num_cached_tokens: int | None = None
    """Found in the prefix cache when it first entered a slot."""
    next_prompt_logprob: int = 1
    """Position of the first prompt token whose log probability was not delivered yet."""

    slot: int | None = None
    epoch: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_registered_blocks: int = 0
    """The first ones of `block_ids`, offered to the prefix cache already (or found there)."""
    num_tokens_to_register: int = 0
    """Tokens that have to be known and computed before there is a block to offer."""
    num_computed_tokens: int = 0
    """Counted when they are scheduled, not when their result comes."""
    num_prefill_tokens: int = field(init=False)
    """Tokens that were known when it last came to wait: no draw before all are computed."""
    num_samples_in_flight: int = 0
    last_plan: int = 0
    """Number of the plan that it was last in."""

    def __post_init__(self, max_model_len: int) -> None:
        self.token_ids = list(self.added.token_ids)
        self.num_prompt_tokens = self.num_prefill_tokens = len(self.token_ids)
        assert 0 < self.num_prompt_tokens <= max_model_len
        assert self.added.params.max_tokens > 0
        self.stop_token_ids = frozenset(self.added.params.stop_token_ids)
        self.wants_prompt_logprobs = self.added.params.prompt_logprobs is not None
        self.max_num_tokens = min(
            self.num_prompt_tokens + self.added.params.max_tokens,
            max(max_model_len, self.num_prompt_tokens + 1),
        )

    @property
    def key(self) -> Key:
        return self.source, self.added.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """What can be scheduled: literals, or with a sample in flight the one token it will be."""
        return len(self.token_ids) + self.num_samples_in_flight - self.num_computed_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        return max(self.num_prefill_tokens - self.num_computed_tokens, 0)

    @property
    def may_grow(self) -> bool:
        """Whether there is a token to draw after those known and those in flight."""
        return len(self.token_ids) + self.num_samples_in_flight < self.max_num_tokens

    def num_schedulable_tokens(self, async_scheduling: bool) -> int:
        """`num_remaining_tokens` where the plan need not wait for samples in flight, else 0."""
        num_in_flight = self.num_samples_in_flight
        num_tokens = len(self.token_ids) + num_in_flight
        if num_in_flight and not (
            async_scheduling and num_in_flight == 1 and num_tokens < self.max_num_tokens
        ):
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Every prompt token has to be computed, cached or not, until all are delivered."""
        return self.wants_prompt_logprobs and self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def counts_tokens(self) -> bool:
        """Its penalties depend on every token so far."""
        params = self.added.params
        return (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
        )

    def slot_params(self) -> SlotParams:
        """What the device needs to know when it enters a slot."""
        params = self.added.params
        return SlotParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            choice_index=params.choice_index,
            logprobs=params.logprobs,
            num_prompt_tokens=self.num_prompt_tokens,
            prompt_logprobs=params.prompt_logprobs if self.awaits_prompt_logprobs else None,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids if params.min_tokens else (),
        )

    def next_prompt_id(self, position: int) -> int:
        """The token at `position`, if it is one of the prompt and its log probability is awaited;
        -1 otherwise."""
        if self.awaits_prompt_logprobs and position < self.num_prompt_tokens:
            return self.token_ids[position]
        return -1

    def take_prompt_logprobs(
        self, start: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Those, of positions start, start + 1, …, that are new: preemption computes some again."""
        assert start <= self.next_prompt_logprob
        fresh = logprobs[self.next_prompt_logprob - start :]
        self.next_prompt_logprob += len(fresh)
        return fresh

    def take(self, drawn: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Drawn tokens, up to one that ends the request: how many were taken, and why it ends."""
        known, num_taken = self.token_ids, 0
        for token_id in drawn:
            known.append(token_id)
            num_taken += 1
            is_stop = token_id in self.stop_token_ids
            if is_stop and self.num_output_tokens >= self.added.params.min_tokens:
                return num_taken, "stop"
            if len(known) == self.max_num_tokens:
                return num_taken, "length"
        return num_taken, None

    def iter_digests(self, start: int, stop: int, block_size: int) -> Iterator[bytes]:
        """Digests of the full blocks `start` to `stop` - 1, computed once and only when needed."""
        for index in range(start, stop):
            while len(self.digests) < index + 2:
                first = (len(self.digests) - 1) * block_size
                block = self.token_ids[first : first + block_size]
                self.digests.append(block_digest(self.digests[-1], block))
            yield self.digests[index + 1]

    def enter(self, slot: int, epoch: int, num_cached_blocks: int, block_size: int) -> None:
        """Waiting to running; the tokens of the cached blocks need not be computed."""
        self.slot = slot
        self.epoch = epoch
        self.num_registered_blocks = num_cached_blocks
        self.num_tokens_to_register = (num_cached_blocks + 1) * block_size
        self.num_computed_tokens = num_cached_blocks * block_size
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.num_computed_tokens

    def leave(self) -> None:
        """Running to waiting, or to its end. Samples in flight are void: their epoch is over."""
        self.slot = None
        self.block_ids = []
        self.num_registered_blocks = 0
        self.num_computed_tokens = 0
        self.num_prefill_tokens = len(self.token_ids)
        self.num_samples_in_flight = 0
