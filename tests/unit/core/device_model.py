"""A device for scheduler tests: it runs plans in order and knows what every KV cell must hold.

The "model" is a chain: the state after a token is a function of the state before it, which is read
from the KV cell of the position before, through the slot's block table. The drawn token is a
function of the state. So a wrong block, a lost or a repeated token changes everything after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from aioengine.messages import (
    PREV,
    AddRequest,
    PromptLogprobs,
    Sampled,
    SlotHistory,
    SlotParams,
    SlotStep,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB_SIZE = 11

Cell = tuple[int, int]
"""(token id, state after it); the state depends on every token before, so on the position too."""

GARBAGE: Cell = (-1, -1)


def first_state(request: AddRequest) -> int:
    """Equal prompts under different salts are different chains."""
    return sum(request.cache_salt.encode(), 17)


def next_state(state: int, token_id: int) -> int:
    return (state * 1_000_003 + token_id * 7919 + 12345) % 2**61


def draw(state: int) -> int:
    return (state >> 7) % VOCAB_SIZE


def true_cells(request: AddRequest, num_tokens: int) -> list[Cell]:
    """What the request alone, never stopped, would leave in `num_tokens` positions."""
    state, cells = first_state(request), []
    for position in range(num_tokens):
        is_prompt = position < len(request.token_ids)
        token_id = request.token_ids[position] if is_prompt else draw(state)
        state = next_state(state, token_id)
        cells.append((token_id, state))
    return cells


def prompt_logprob(position: int, token_id: int) -> TokenLogprobs:
    """Tells where it belongs."""
    return TokenLogprobs(-float(position), ((token_id, 0.0),))


def expected_prompt_logprobs(request: AddRequest) -> list[TokenLogprobs]:
    if request.params.prompt_logprobs is None:
        return []
    return [prompt_logprob(*place) for place in enumerate(request.token_ids)][1:]


def counts_tokens(params: SlotParams) -> bool:
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    return penalties != (0, 0, 1)


def expected_output(request: AddRequest, max_model_len: int) -> tuple[tuple[int, ...], str]:
    """What the request alone would produce, and its finish_reason: one token at least."""
    params, num_prompt = request.params, len(request.token_ids)
    limit = max(min(num_prompt + params.max_tokens, max_model_len), num_prompt + 1)
    output = tuple(token_id for token_id, _ in true_cells(request, limit)[num_prompt:])
    for num_output, token_id in enumerate(output, start=1):
        if token_id in params.stop_token_ids and num_output >= params.min_tokens:
            return output[:num_output], "stop"
    return output, "length"


@dataclass
class Tenant:
    """What a worker keeps about one slot, and the truth to check it against."""

    epoch: int
    request: AddRequest
    params: SlotParams
    truth: list[Cell]
    heard: dict[int, int] = field(default_factory=dict)
    """What the output rank knows: token ids by position, from history, literals and its draws."""
    block_ids: list[int] = field(default_factory=list)
    num_computed: int | None = None
    """None until the first step says where the cached prefix ends."""
    last_sampled: int | None = None
    may_use_prev: bool = False


class DeviceModel:
    """Runs plans when they are made: what a real device does later depends on their order only."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.requests: dict[int, AddRequest] = {}
        """By seed, the only thing in a plan that tells who a request is."""
        self.num_cached: dict[int, int] = {}
        """Seed -> tokens found in the cache when it first entered."""
        self.kv: dict[tuple[int, int], Cell] = {}
        """By (block id, offset)."""
        self.tenants: dict[int, Tenant] = {}
        self.epochs: set[int] = set()
        self.is_broken = False
        """A plan failed and the scheduler does not know yet: what is computed is garbage."""
        self.seq = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Every step must find its request's history intact, before it and after the whole plan."""
        slots = [step.slot for step in plan.steps]
        assert len(set(slots)) == len(slots)
        assert {new.slot for new in plan.new_slots} <= set(slots)
        for new in plan.new_slots:
            assert new.epoch not in self.epochs
            self.epochs.add(new.epoch)
            request = self.requests[new.params.seed]
            truth = true_cells(request, self.max_model_len)
            self.tenants[new.slot] = Tenant(new.epoch, request, new.params, truth)
            asked = request.params
            assert new.params.num_prompt_tokens == len(request.token_ids)
            assert new.params.min_tokens == asked.min_tokens
            assert new.params.stop_token_ids == (asked.stop_token_ids if asked.min_tokens else ())
        self._hear_history(plan.history, {new.slot for new in plan.new_slots})
        sampled = [self._run_step(self.tenants[step.slot], step) for step in plan.steps]
        for step in plan.steps:
            self._check_history(self.tenants[step.slot])
            if step.sample:
                self.tenants[step.slot].may_use_prev = plan.share_sampled
        self.seq += 1
        return StepResult(
            self.seq,
            tuple(s for s in sampled if s is not None),
            prompt_logprobs=tuple(self._describe_prompts(plan)),
        )

    def _hear_history(self, history: tuple[SlotHistory, ...], new_slots: set[int]) -> None:
        for part in history:
            tenant = self.tenants[part.slot]
            assert part.slot in new_slots
            assert tenant.epoch == part.epoch
            assert counts_tokens(tenant.params)
            assert part.token_ids
            assert not tenant.heard
            tenant.heard.update(enumerate(part.token_ids))

    def _describe_prompts(self, plan: StepPlan) -> Iterator[PromptLogprobs]:
        """What the tokens and `next_prompt_id` of each step allow."""
        for step in plan.steps:
            tenant = self.tenants[step.slot]
            prompt = tenant.request.token_ids
            end = step.start + len(step.token_ids)
            if tenant.params.prompt_logprobs is None:
                assert step.next_prompt_id == -1
                continue
            assert tenant.num_computed == end, "every token is computed"
            assert step.next_prompt_id == (prompt[end] if end < len(prompt) else -1)
            known = [*step.token_ids[1:], *([step.next_prompt_id] * (step.next_prompt_id >= 0))]
            described = tuple(
                prompt_logprob(position, token_id)
                for position, token_id in enumerate(known, start=step.start + 1)
                if position < len(prompt)
            )
            if described:
                yield PromptLogprobs(step.slot, step.epoch, step.start + 1, described)

    def _run_step(self, tenant: Tenant, step: SlotStep) -> Sampled | None:
        assert tenant.epoch == step.epoch
        self._append_blocks(tenant, step)
        self._check_history(tenant)
        for position, token_id in enumerate(step.token_ids, start=step.start):
            if token_id != PREV:
                assert tenant.heard.setdefault(position, token_id) == token_id
        for position, token_id in enumerate(self._resolve(tenant, step), start=step.start):
            self._write(tenant, position, token_id)
            tenant.num_computed = position + 1
        num_prompt, max_tokens = len(tenant.request.token_ids), tenant.request.params.max_tokens
        assert tenant.num_computed is not None
        limit = min(num_prompt + max_tokens, self.max_model_len)
        assert tenant.num_computed < max(limit, num_prompt + 1)
        if not step.sample:
            return None
        assert tenant.num_computed >= num_prompt
        if counts_tokens(tenant.params) and not self.is_broken:
            known = [tenant.heard.get(position) for position in range(tenant.num_computed)]
            assert known == [token_id for token_id, _ in tenant.truth[: tenant.num_computed]]
        tenant.last_sampled = draw(self._read(tenant, tenant.num_computed - 1)[1])
        assert tenant.num_computed not in tenant.heard
        tenant.heard[tenant.num_computed] = tenant.last_sampled
        return Sampled(step.slot, step.epoch, (tenant.last_sampled,))

    def _append_blocks(self, tenant: Tenant, step: SlotStep) -> None:
        tenant.block_ids += step.new_block_ids
        assert all(0 < block_id < self.num_blocks for block_id in step.new_block_ids)
        assert len(set(tenant.block_ids)) == len(tenant.block_ids)
        assert len(tenant.block_ids) == -(-(step.start + len(step.token_ids)) // self.block_size)
        if tenant.num_computed is None:
            assert step.start % self.block_size == 0
            assert step.start == 0 or tenant.params.prompt_logprobs is None
            if counts_tokens(tenant.params):
                assert list(tenant.heard) == list(range(step.start))
            tenant.num_computed = step.start
            self.num_cached.setdefault(tenant.request.params.seed, step.start)
        assert step.start == tenant.num_computed

    def _resolve(self, tenant: Tenant, step: SlotStep) -> tuple[int, ...]:
        assert step.token_ids
        if PREV not in step.token_ids:
            return step.token_ids
        assert step.token_ids == (PREV,)
        assert tenant.may_use_prev
        assert tenant.last_sampled is not None
        return (tenant.last_sampled,)

    def _write(self, tenant: Tenant, position: int, token_id: int) -> None:
        if self.is_broken:
            self.kv[self._cell_key(tenant, position)] = GARBAGE
            return
        before = self._read(tenant, position - 1)[1] if position else first_state(tenant.request)
        self.kv[self._cell_key(tenant, position)] = (token_id, next_state(before, token_id))

    def _check_history(self, tenant: Tenant) -> None:
        """Every computed position of a request must be found through its block table."""
        assert tenant.num_computed is not None
        if not self.is_broken:
            positions = range(tenant.num_computed)
            assert [self._read(tenant, p) for p in positions] == tenant.truth[: len(positions)]

    def _read(self, tenant: Tenant, position: int) -> Cell:
        return self.kv[self._cell_key(tenant, position)]

    def _cell_key(self, tenant: Tenant, position: int) -> tuple[int, int]:
        return tenant.block_ids[position // self.block_size], position % self.block_size
