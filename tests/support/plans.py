"""Hand-made StepPlans, for tests that drive a Worker without a scheduler."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from aioengine.config import EngineConfig
from aioengine.messages import PREV, NewSlot, SlotParams, SlotStep, StepPlan, StepResult
from aioengine.worker.runner import Worker

GREEDY = SlotParams(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice_index=0, logprobs=None
)
EVERY_RULE: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"frequency_penalty": 0.5, "logprobs": 0},
    {"logit_bias": ((5, -100.0),), "min_tokens": 9, "stop_token_ids": (2,)},
]


class ScriptedRequest:
    """One tenant of a slot; hands out block ids first_block, first_block + 1, …"""

    def __init__(
        self, slot: int, epoch: int, params: SlotParams, first_block: int, block_size: int
    ) -> None:
        self.new = NewSlot(slot, epoch, params)
        self._block_ids = itertools.count(first_block)
        self._block_size = block_size
        self._position = 0

    def step(self, token_ids: Sequence[int] = (PREV,), *, sample: bool = True) -> SlotStep:
        start, self._position = self._position, self._position + len(token_ids)
        num_new = -(-self._position // self._block_size) - -(-start // self._block_size)
        blocks = tuple(itertools.islice(self._block_ids, num_new))
        return SlotStep(self.new.slot, self.new.epoch, start, tuple(token_ids), blocks, sample)


def lockstep_plans(config: EngineConfig, num_logprobs: int) -> list[StepPlan]:
    """Four requests in two lanes that alternate, as two microbatches do: prefill in chunks, then
    decodes by PREV, each of which refers to the lane's plan two before; and a slot's second tenant.
    """
    params = [
        SlotParams(0.0, 0, 1.0, 0.0, 0, 0, num_logprobs),
        SlotParams(1.0, 0, 1.0, 0.0, 2**40 + 7, 1, num_logprobs),
        SlotParams(0.7, 20, 0.9, 0.0, 3, 0, num_logprobs),
        SlotParams(1.3, 0, 1.0, 0.05, 4, 0, num_logprobs),
        SlotParams(0.9, 0, 0.8, 0.0, 5, 2, num_logprobs),
    ]
    requests = [
        ScriptedRequest(slot, epoch, params[i], 1 + 16 * i, config.block_size)
        for i, (slot, epoch) in enumerate([(0, 1), (1, 1), (2, 1), (3, 1), (1, 2)])
    ]
    long, short, chunked, single, tenant = requests
    first = [
        _plan([long, short], [long.step(range(3, 8), sample=False), short.step([9, 10])]),
        _plan([], [long.step([1, 2, 30, 40]), short.step()]),
        *(_plan([], [short.step(), long.step()]) for _ in range(3)),
        _plan([tenant], [long.step(), tenant.step(range(20, 31))]),
        *(_plan([], [long.step(), tenant.step()]) for _ in range(3)),
    ]
    second = [
        _plan([chunked], [chunked.step(range(10, 22), sample=False)]),
        _plan([single], [chunked.step(range(60, 65), sample=False), single.step([77])]),
        _plan([], [single.step(), chunked.step([5, 6])]),
        *(_plan([], [single.step(), chunked.step()]) for _ in range(6)),
    ]
    return [plan for pair in zip(first, second, strict=True) for plan in pair]


def plans_with_every_rule(block_size: int) -> list[StepPlan]:
    """One request for each of EVERY_RULE: a prefill, decodes by PREV, one by a literal id."""
    requests = []
    for slot, rules in enumerate(EVERY_RULE):
        params = msgspec.structs.replace(GREEDY, num_prompt_tokens=5, **rules)
        requests.append(ScriptedRequest(slot, 1, params, 1 + 8 * slot, block_size))
    prefill = _plan(requests, [request.step([1, 2, 3, 4, 5]) for request in requests])
    decodes = [_plan([], [request.step() for request in requests]) for _ in range(2)]
    literal = _plan([], [request.step([7]) for request in requests])
    return [prefill, *decodes, literal]


def run_plans(worker: Worker, plans: Sequence[StepPlan], num_ahead: int) -> list[StepResult]:
    """Executes plans, each prepared `num_ahead` plans early. Results on the output rank only."""
    results = []
    for seq, plan in enumerate(plans[:num_ahead]):
        worker.prepare(seq, plan)
    for seq, plan in enumerate(plans):
        if seq + num_ahead < len(plans):
            worker.prepare(seq + num_ahead, plans[seq + num_ahead])
        result = worker.execute(seq, plan)
        if result is not None:
            assert result.seq == seq
            results.append(result)
    return results


def _plan(new: list[ScriptedRequest], steps: list[SlotStep]) -> StepPlan:
    return StepPlan(tuple(request.new for request in new), tuple(steps), share_sampled=True)
