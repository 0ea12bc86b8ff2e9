"""What the replica computes next: admission, microbatches, budgets, preemption, endings."""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Final

from aioengine.core.blocks import BlockPool, root_digest
from aioengine.core.request import Key, Order, Request
from aioengine.core.waiting import WaitingQueue
from aioengine.messages import (
    PREV,
    AddRequest,
    FinishReason,
    LoadStats,
    NewSlot,
    RequestDelta,
    Sampled,
    SlotHistory,
    SlotStep,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

_ONE_PREV: Final = (PREV,)
_MIN_CHUNK_TOKENS: Final = 256
"""Of a pipeline's prefill: a token of smaller chunks takes longer."""
_Ready = tuple[Order, int, Request]
"""A running request, and how many tokens of it can be computed now. Orders are unique."""


@dataclass(slots=True)
class _Draft:
    """The plan being built, and what is left of its budget."""

    number: int
    budget: int
    """Tokens that still fit."""
    max_num_requests: int
    history_budget: int
    """Ids of history that still fit."""
    new_slots: list[NewSlot] = field(default_factory=list)
    steps: dict[int, SlotStep] = field(default_factory=dict)
    """By slot."""
    history: list[SlotHistory] = field(default_factory=list)
    share_sampled: bool = False
    has_preempted: bool = False

    @property
    def is_full(self) -> bool:
        return not self.budget or len(self.steps) == self.max_num_requests


class Scheduler:
    """Decides, never executes. Plans must run, and their results come back, in the order made.

    A *source* is a front end. Deltas come as (source, delta) pairs. How many plans are in flight is
    the caller's business.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        num_slots: int,
        num_stages: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        async_scheduling: bool,
    ) -> None:
        assert num_slots <= max_num_batched_tokens, "every running request gets a token in a step"
        assert pool.num_blocks_for(max_model_len) <= pool.num_usable, "one request must fit alone"
        self._pool = pool
        self._num_slots = num_slots
        self._num_stages = num_stages
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._async_scheduling = async_scheduling
        self.weight_version = 0
        """Of the weights that the next plan meets: new requests share prefixes within it."""

        self._requests: dict[Key, Request] = {}
        self._waiting = WaitingQueue()
        self._running: OrderedDict[int, Request] = OrderedDict()
        """By slot, least recently scheduled first."""
        self._free_slots = list(range(num_slots))
        self._arrivals = count()
        self._epochs = count(1)
        self._num_plans = 0
        """Empty ones, which are not sent, do not count."""
        self._admitted: list[Key] = []
        self._num_preemptions = 0
        self._num_prefill_tokens = 0
        """That are left to compute, of all requests."""
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0
        self._last_seq = 0

    # --- requests come and go -------------------------------------------------------------------

    def add(self, added: AddRequest, source: str) -> None:
        """The caller has checked the prompt: not empty, not longer than max_model_len."""
        request = Request(
            source=source,
            added=added,
            order=(added.priority, next(self._arrivals)),
            digests=[root_digest(added.cache_salt, self.weight_version)],
            max_model_len=self._max_model_len,
        )
        assert request.key not in self._requests
        self._requests[request.key] = request
        self._waiting.push(request)
        self._num_prefill_tokens += request.num_prefill_tokens

    def abort(self, source: str, request_id: str) -> None:
        """Frees slot and blocks at once. An unknown id is fine: the request may just have ended."""
        request = self._requests.get((source, request_id))
        if request is not None:
            self._remove(request)

    def abort_source(self, source: str) -> None:
        """A front end is gone."""
        for request in [r for r in self._requests.values() if r.source == source]:
            self._remove(request)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    # --- the next plan --------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Running requests first, then new ones. Empty when nothing can be computed now.

        A plan takes its share of the active requests, so that every stage gets a microbatch. Who
        was in one of the last num_stages - 1 plans comes after the new ones: else, with async
        scheduling, the running requests alone could fill every plan.
        """
        num_active = len(self._running) + min(len(self._waiting), len(self._free_slots))
        max_num_requests = -(-num_active // self._num_stages)
        draft = _Draft(
            number=self._num_plans + 1,
            budget=self._budget(max_num_requests),
            max_num_requests=max_num_requests,
            history_budget=self._max_num_batched_tokens,
        )
        rested: deque[_Ready] = deque()
        recent: deque[_Ready] = deque()
        last_rested_plan = draft.number - self._num_stages
        for request in self._running.values():
            if num_tokens := request.num_schedulable_tokens(self._async_scheduling):
                ready = rested if request.last_plan <= last_rested_plan else recent
                ready.append((request.order, num_tokens, request))
        self._continue_running(draft, rested)
        self._admit_waiting(draft)
        self._continue_running(draft, recent)
        if draft.steps:
            self._num_plans = draft.number
        return StepPlan(
            tuple(draft.new_slots),
            tuple(draft.steps.values()),
            draft.share_sampled,
            tuple(draft.history),
        )

    def _budget(self, max_num_requests: int) -> int:
        """Most tokens of the next plan.

        The stages of a pipeline stand idle until the first chunk of a prefill has come to them, and
        after the last has left: so the less there is to compute, the smaller its chunks, and at any
        time at least two for each stage.
        """
        if self._num_stages == 1:
            return self._max_num_batched_tokens
        chunk = max(self._num_prefill_tokens // (2 * self._num_stages), _MIN_CHUNK_TOKENS)
        return min(self._max_num_batched_tokens, max_num_requests + chunk)

    def _continue_running(self, draft: _Draft, ready: deque[_Ready]) -> None:
        """Fill the draft up from `ready`; who finds no block there does not take a place."""
        while ready and not draft.is_full:
            num_places = min(draft.max_num_requests - len(draft.steps), len(ready))
            batch = [ready.popleft() for _ in range(num_places)]
            for _, num_tokens, request in _share_budget(batch, draft.budget):
                if request.slot is not None:  # else a better one has just preempted it
                    self._continue_request(draft, request, num_tokens)

    def _continue_request(self, draft: _Draft, request: Request, num_tokens: int) -> None:
        """Preempts the worst outside the plan for a block, but none better than `request`."""
        pool, num_held = self._pool, len(request.block_ids)
        end = request.num_computed_tokens + num_tokens
        if end <= num_held * pool.block_size:
            self._add_step(draft, request, end, ())
            return
        num_blocks = pool.num_blocks_for(end) - num_held
        while pool.num_free < num_blocks:
            in_reach = (r for slot, r in self._running.items() if slot not in draft.steps)
            worst = max(in_reach, key=attrgetter("order"))
            if worst is request:
                return
            self._preempt(worst)
            draft.has_preempted = True
        self._add_step(draft, request, end, tuple(pool.allocate(num_blocks)))

    def _admit_waiting(self, draft: _Draft) -> None:
        """Best first, and only with blocks for all its tokens beyond what running ones still need.

        A prefill that cannot end would preempt, or be preempted, for nothing.
        """
        if not self._waiting or not self._free_slots:
            return
        num_owed = sum(self._num_blocks_to_come(request) for request in self._running.values())
        while (
            self._free_slots
            and not draft.is_full
            and not draft.has_preempted
            and (request := self._waiting.peek()) is not None
        ):
            cached = self._match_prefix(draft, request)
            num_new = self._num_blocks_to_come(request) - len(cached)
            num_taken = num_new + self._pool.num_free_among(cached)
            if num_taken + num_owed > self._pool.num_free:
                return
            self._admit(draft, request, cached)
            num_owed += self._num_blocks_to_come(request)

    def _num_blocks_to_come(self, request: Request) -> int:
        """Blocks that its known tokens and the next one still need; the last one needs none."""
        num_tokens = min(len(request.token_ids) + 1, request.max_num_tokens - 1)
        return self._pool.num_blocks_for(num_tokens) - len(request.block_ids)

    def _reads_prefix_cache(self, request: Request) -> bool:
        return self._pool.enable_prefix_caching and not request.awaits_prompt_logprobs

    def _match_prefix(self, draft: _Draft, request: Request) -> list[int]:
        """Cached blocks; at least the last token is left to compute, for its logits.

        Where penalties count tokens, those of a hit travel as history: not more than still fit.
        """
        if not self._reads_prefix_cache(request):
            return []
        block_size = self._pool.block_size
        num_blocks = (len(request.token_ids) - 1) // block_size
        if request.counts_tokens:
            num_blocks = min(num_blocks, draft.history_budget // block_size)
        return self._pool.match(request.iter_digests(0, num_blocks, block_size))

    def _admit(self, draft: _Draft, request: Request, cached: list[int]) -> None:
        self._waiting.discard(request)
        if not request.epoch:
            self._admitted.append(request.key)
        slot = heapq.heappop(self._free_slots)
        self._running[slot] = request
        self._pool.hold(cached)
        request.enter(slot, next(self._epochs), len(cached), self._pool.block_size)
        self._num_prefill_tokens -= request.num_computed_tokens
        if self._reads_prefix_cache(request):
            self._prefix_cache_queries += len(request.token_ids)
            self._prefix_cache_hits += request.num_computed_tokens
        draft.new_slots.append(NewSlot(slot, request.epoch, request.slot_params()))
        if cached and request.counts_tokens:
            history = tuple(request.token_ids[: request.num_computed_tokens])
            draft.history.append(SlotHistory(slot, request.epoch, history))
            draft.history_budget -= len(history)

        end = request.num_computed_tokens + min(request.num_remaining_tokens, draft.budget)
        num_blocks = self._pool.num_blocks_for(end) - len(cached)
        self._add_step(draft, request, end, (*cached, *self._pool.allocate(num_blocks)))

    def _add_step(
        self, draft: _Draft, request: Request, end: int, new_block_ids: tuple[int, ...]
    ) -> None:
        """Put a request's tokens up to position `end` into the plan: computed from here on."""
        slot = request.slot
        assert slot is not None
        start, num_known = request.num_computed_tokens, len(request.token_ids)
        num_in_flight = request.num_samples_in_flight
        sample = end == num_known + num_in_flight
        draft.steps[slot] = SlotStep(
            slot,
            request.epoch,
            start,
            tuple(request.token_ids[start:end]) if start < num_known else _ONE_PREV,
            new_block_ids,
            sample,
            request.next_prompt_id(end) if request.wants_prompt_logprobs else -1,
        )
        draft.budget -= end - start
        if start < request.num_prefill_tokens:
            self._num_prefill_tokens -= end - start
        if new_block_ids:
            request.block_ids += new_block_ids
        request.num_computed_tokens = end
        request.last_plan = draft.number
        if sample:
            request.num_samples_in_flight = num_in_flight + 1
            if self._async_scheduling and not draft.share_sampled:
                draft.share_sampled = request.may_grow
        if min(end, num_known) >= request.num_tokens_to_register:
            self._register_full_blocks(request)
        self._running.move_to_end(slot)

    def _register_full_blocks(self, request: Request) -> None:
        """Offer for reuse what is computed, or planned to be, from tokens that are known."""
        block_size, first = self._pool.block_size, request.num_registered_blocks
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // block_size
        if self._pool.enable_prefix_caching:
            digests = request.iter_digests(first, num_full, block_size)
            for block_id, digest in zip(request.block_ids[first:num_full], digests, strict=True):
                self._pool.register(block_id, digest)
        request.num_registered_blocks = num_full
        request.num_tokens_to_register = (num_full + 1) * block_size

    # --- results --------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[tuple[str, RequestDelta]]:
        """Take what one plan gave. What belongs to requests that have left their slot is dropped.

        A request's prompt log probabilities come before its first token.
        """
        self._last_seq = result.seq
        deltas = []
        for part in result.prompt_logprobs:
            if (request := self._tenant(part.slot, part.epoch)) is not None:
                fresh = request.take_prompt_logprobs(part.start, part.logprobs)
                if fresh:
                    deltas.append((request.source, _delta(request, prompt_logprobs=fresh)))
        running = self._running
        for sampled in result.sampled:
            tenant = running.get(sampled.slot)
            if tenant is not None and tenant.epoch == sampled.epoch:
                deltas.append((tenant.source, self._take_sample(tenant, sampled)))
        return deltas

    def _take_sample(self, request: Request, sampled: Sampled) -> RequestDelta:
        if sampled.error:
            return self._end(request, "error", error=sampled.error)
        request.num_samples_in_flight -= 1
        token_ids, logprobs = sampled.token_ids, sampled.logprobs
        num_taken, finish_reason = request.take(token_ids)
        if num_taken < len(token_ids):
            token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
        num_whole = min(request.num_computed_tokens, len(request.token_ids))
        if num_whole >= request.num_tokens_to_register:
            self._register_full_blocks(request)
        if finish_reason is not None:
            return self._end(request, finish_reason, token_ids, logprobs)
        return _delta(request, token_ids, logprobs)

    def fail_plan(self, plan: StepPlan, error: str) -> list[tuple[str, RequestDelta]]:
        """A plan raised on its only rank: its requests end, if they are still in their slots.

        What the plan has written is unknown, and others may share it or have it in plans in flight:
        so the prefix cache is emptied and every other running request starts over.
        """
        failed = [
            request
            for step in plan.steps
            if (request := self._tenant(step.slot, step.epoch)) is not None
        ]
        deltas = self._fail(failed, error)
        for request in list(self._running.values()):
            self._preempt(request)
        self._pool.forget_content()
        return deltas

    def reset_prefix_cache(self) -> None:
        """No later request reuses what was computed so far; running ones keep their blocks."""
        self._pool.forget_content()

    def fail_all(self, error: str) -> list[tuple[str, RequestDelta]]:
        """The replica has failed: every request ends."""
        return self._fail(list(self._requests.values()), error)

    def _fail(self, requests: Iterable[Request], error: str) -> list[tuple[str, RequestDelta]]:
        return [(request.source, self._end(request, "error", error=error)) for request in requests]

    # --- slots ----------------------------------------------------------------------------------

    def _tenant(self, slot: int, epoch: int) -> Request | None:
        request = self._running.get(slot)
        return request if request is not None and request.epoch == epoch else None

    def _preempt(self, request: Request) -> None:
        """Back to the queue, at its old place; its known tokens will be computed again."""
        self._num_prefill_tokens -= request.num_prefill_tokens_left
        self._vacate(request)
        self._waiting.push(request)
        self._num_prefill_tokens += request.num_prefill_tokens
        self._num_preemptions += 1

    def _end(
        self,
        request: Request,
        finish_reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str = "",
    ) -> RequestDelta:
        """The last delta of a request, which is forgotten."""
        self._remove(request)
        return _delta(request, token_ids, logprobs, finish_reason, error)

    def _remove(self, request: Request) -> None:
        del self._requests[request.key]
        self._num_prefill_tokens -= request.num_prefill_tokens_left
        if request.slot is None:
            self._waiting.discard(request)
        else:
            self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Plans run in order: blocks that one in flight still writes can be reused at once."""
        assert request.slot is not None
        del self._running[request.slot]
        heapq.heappush(self._free_slots, request.slot)
        self._pool.free(request.block_ids)
        request.leave()

    # --- observation ----------------------------------------------------------------------------

    def take_admitted(self) -> list[Key]:
        """Requests that got their first slot since the last call; some may have left meanwhile."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def stats(self) -> LoadStats:
        return LoadStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_usable,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            last_seq=self._last_seq,
            num_cached_blocks=self._pool.num_reusable,
            num_prefill_tokens=self._num_prefill_tokens,
            prefix_cache_epoch=self._pool.num_resets + self.weight_version,
        )

    def check_invariants(self) -> None:
        num_holders: Counter[int] = Counter()
        for slot, request in self._running.items():
            assert request.slot == slot
            assert len(request.block_ids) == self._pool.num_blocks_for(request.num_computed_tokens)
            assert request.num_samples_in_flight <= 1 + self._async_scheduling
            assert request.num_remaining_tokens == 1 or not request.num_samples_in_flight
            num_holders.update(request.block_ids)
        self._pool.check_invariants(num_holders)
        num_left = sum(request.num_prefill_tokens_left for request in self._requests.values())
        assert self._num_prefill_tokens == num_left
        assert sorted([*self._running, *self._free_slots]) == list(range(self._num_slots))
        num_slotless = sum(request.slot is None for request in self._requests.values())
        assert num_slotless == len(self._waiting)
        assert len(self._requests) == len(self._running) + len(self._waiting)


def _share_budget(batch: list[_Ready], budget: int) -> list[_Ready]:
    """How many tokens each gets: decodes first, prefills share the rest.

    Who gets some comes back best (priority, arrival) first: in this order blocks are given out, so
    that a request never has to preempt one already in the plan.
    """
    batch.sort()
    if sum([num_wanted for _, num_wanted, _ in batch]) <= budget:
        return batch
    shares = []
    for order, num_wanted, request in sorted(batch, key=lambda ready: ready[1] > 1):
        num_tokens = min(num_wanted, budget)
        budget -= num_tokens
        if num_tokens:
            shares.append((order, num_tokens, request))
    return sorted(shares)


def _delta(
    request: Request,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    finish_reason: FinishReason | None = None,
    error: str = "",
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> RequestDelta:
    """The first one also tells how much of the prompt was cached."""
    num_cached = 0
    if request.num_cached_tokens and request.num_output_tokens == len(token_ids):
        num_cached = request.num_cached_tokens
    return RequestDelta(
        request.added.request_id,
        token_ids,
        logprobs,
        finish_reason,
        error,
        num_cached,
        prompt_logprobs,
    )
