"""A replica for scheduler tests: scheduler, modelled device and the plans in flight between them.

Everything that crosses is checked: plans against the rules of the scheduler, deltas against what
each request would produce alone.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from aioengine.core.blocks import BlockPool
from aioengine.core.request import Key
from aioengine.core.scheduler import Scheduler
from aioengine.messages import (
    AddRequest,
    ChoiceParams,
    RequestDelta,
    Sampled,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from tests.unit.core.device_model import (
    DeviceModel,
    expected_output,
    expected_prompt_logprobs,
)


def tokens(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i) % 11 for i in range(num_tokens))


def lengths(plan: StepPlan) -> dict[int, int]:
    return {step.slot: len(step.token_ids) for step in plan.steps}


def slots(plan: StepPlan) -> set[int]:
    return {step.slot for step in plan.steps}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_blocks: int = 65
    block_size: int = 4
    num_slots: int = 8
    num_stages: int = 1
    max_num_batched_tokens: int = 32
    max_model_len: int = 64
    async_scheduling: bool = False
    enable_prefix_caching: bool = True


@dataclass
class Client:
    """What the front end knows of a request."""

    added: AddRequest
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_deltas: int = 0
    is_admitted: bool = False
    finish_reason: str | None = None
    is_aborted: bool = False

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None and not self.is_aborted


class Replica:
    """`schedule` makes a plan and runs it, `apply` brings the oldest result back."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.scheduler = Scheduler(
            BlockPool(
                sizes.num_blocks,
                sizes.block_size,
                enable_prefix_caching=sizes.enable_prefix_caching,
            ),
            num_slots=sizes.num_slots,
            num_stages=sizes.num_stages,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            async_scheduling=sizes.async_scheduling,
        )
        self.device = DeviceModel(sizes.num_blocks, sizes.block_size, sizes.max_model_len)
        self.clients: dict[Key, Client] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult | None]] = deque()
        """Without a result: the plan that failed."""

    @property
    def live(self) -> list[Key]:
        return [key for key, client in self.clients.items() if client.is_live]

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.sizes.num_stages + self.sizes.async_scheduling

    def add(
        self,
        token_ids: tuple[int, ...],
        *,
        source: str = "api",
        max_tokens: int = 4,
        stop_token_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        prompt_logprobs: int | None = None,
        **penalties: float,
    ) -> Key:
        seed = len(self.clients)
        params = ChoiceParams(
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            seed=seed,
            prompt_logprobs=prompt_logprobs,
            **penalties,
        )
        num_of_source = sum(key[0] == source for key in self.clients)
        added = AddRequest(
            request_id=str(num_of_source),
            token_ids=token_ids,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.device.requests[seed] = added
        self.clients[source, added.request_id] = Client(added)
        self.scheduler.add(added, source)
        return source, added.request_id

    def abort(self, key: Key) -> None:
        self.scheduler.abort(*key)
        self.clients[key].is_aborted |= self.clients[key].is_live

    def abort_source(self, source: str) -> None:
        self.scheduler.abort_source(source)
        for key in self.live:
            self.clients[key].is_aborted |= key[0] == source

    def schedule(self, *, fails: bool = False) -> StepPlan:
        """With `fails` the device raises in this plan, and is broken until the scheduler knows."""
        assert self.has_room
        stats = self.scheduler.stats()
        num_active = min(stats.num_running + stats.num_waiting, self.sizes.num_slots)
        plan = self.scheduler.schedule()
        for key in self.scheduler.take_admitted():
            client = self.clients[key]
            assert client.is_live
            assert not client.is_admitted, "by preemption nobody becomes new"
            client.is_admitted = True
        assert plan.num_tokens <= self.sizes.max_num_batched_tokens
        assert len(plan.steps) <= -(-num_active // self.sizes.num_stages)
        assert all(new.slot < self.sizes.num_slots for new in plan.new_slots)
        assert self.sizes.async_scheduling or not plan.share_sampled
        num_history_ids = sum(len(part.token_ids) for part in plan.history)
        assert num_history_ids <= self.sizes.max_num_batched_tokens
        if plan.is_empty:
            assert self.in_flight or not self.live, "nothing would ever happen again"
            return plan
        self.device.is_broken |= fails
        result = self.device.run(plan)
        self.in_flight.append((plan, None if fails else result))
        return plan

    def apply(self, *, error_row: int | None = None) -> list[tuple[str, RequestDelta]]:
        """`error_row`: the row of the result that had unusable logits."""
        plan, result = self.in_flight.popleft()
        if result is None:
            self.device.is_broken = False
            deltas = self.scheduler.fail_plan(plan, "device error")
        else:
            if error_row is not None and error_row < len(result.sampled):
                rows = list(result.sampled)
                row = rows[error_row]
                rows[error_row] = Sampled(row.slot, row.epoch, (), error="NaN")
                result = msgspec.structs.replace(result, sampled=tuple(rows))
            deltas = self.scheduler.apply(result)
        self.receive(deltas)
        return deltas

    def receive(self, deltas: list[tuple[str, RequestDelta]]) -> None:
        for source, delta in deltas:
            client = self.clients[source, delta.request_id]
            assert client.is_live
            assert client.is_admitted or delta.finish_reason == "error"
            client.output += delta.token_ids
            client.prompt_logprobs += delta.prompt_logprobs
            assert delta.token_ids or delta.prompt_logprobs or delta.finish_reason == "error"
            wanted = expected_prompt_logprobs(client.added)
            assert client.prompt_logprobs == wanted[: len(client.prompt_logprobs)]
            if client.output:
                assert client.prompt_logprobs == wanted
            if client.num_deltas == 0:
                seed = client.added.params.seed
                assert delta.num_cached_tokens == self.device.num_cached.get(seed, 0)
            else:
                assert delta.num_cached_tokens == 0
            client.num_deltas += 1
            client.finish_reason = delta.finish_reason
            assert bool(delta.error) == (delta.finish_reason == "error")
            output, reason = expected_output(client.added, self.sizes.max_model_len)
            assert tuple(client.output) == output[: len(client.output)]
            if delta.finish_reason is None:
                assert len(client.output) < len(output)
            elif delta.finish_reason != "error":
                assert (len(client.output), delta.finish_reason) == (len(output), reason)

    def drain(self) -> int:
        """Run to the end of every request, as full as the pipeline gets; returns plans made."""
        num_tokens = sum(self.sizes.max_model_len for _ in self.live)
        num_plans = 0
        while self.live or self.in_flight:
            if not self.has_room or self.schedule().is_empty:
                self.apply()
            else:
                num_plans += 1
            self.scheduler.check_invariants()
            assert num_plans <= 2 * num_tokens + 10, "no progress"
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert self.scheduler.num_unfinished == 0
        return num_plans
