"""Run by hand: what a plan costs the scheduler, by requests that run and that wait.

    python -m support.waiting_costs [--max-model-len N]

CPU time of this thread per step, in ms: the plan, and the results of the one before it. The first
table has a slot for everyone who runs; in the second, slots are free but the KV cache is full.
"""

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence

from aioengine.core.blocks import BlockPool
from aioengine.core.scheduler import Scheduler
from aioengine.messages import AddRequest, ChoiceParams, Sampled, StepPlan, StepResult

BLOCK_SIZE = 16
NUM_STEPS = 200
NUM_WARM_UP = 20


def prompts(count: int, length: int) -> list[tuple[int, ...]]:
    draw = random.Random(length)
    return [tuple(draw.randrange(3, 500) for _ in range(length)) for _ in range(count)]


def scheduler_of(num_slots: int, num_blocks: int, max_model_len: int) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks + 1, BLOCK_SIZE, enable_prefix_caching=True),
        num_slots=num_slots,
        num_stages=1,
        max_num_batched_tokens=2048,
        max_model_len=max_model_len,
        async_scheduling=True,
    )


def add(scheduler: Scheduler, name: str, token_ids: Sequence[Sequence[int]]) -> None:
    for number, ids in enumerate(token_ids):
        params = ChoiceParams(max_tokens=10**6)
        request = AddRequest(request_id=f"{name}{number}", token_ids=tuple(ids), params=params)
        scheduler.add(request, "front end")


def measure(scheduler: Scheduler) -> tuple[float, float]:
    """Medians in ms: a plan, and taking its results. Two plans are in flight."""
    in_flight: deque[StepPlan] = deque()
    plan_ns, apply_ns = [], []
    for number in range(NUM_WARM_UP + NUM_STEPS):
        while len(in_flight) < 2:
            began = time.thread_time_ns()
            in_flight.append(scheduler.schedule())
            plan_ns.append(time.thread_time_ns() - began)
        plan = in_flight.popleft()
        drawn = tuple(Sampled(s.slot, s.epoch, (7,)) for s in plan.steps if s.sample)
        began = time.thread_time_ns()
        scheduler.apply(StepResult(number, drawn))
        apply_ns.append(time.thread_time_ns() - began)
    parts = (plan_ns[NUM_WARM_UP:], apply_ns[NUM_WARM_UP:])
    plan_ms, apply_ms = (statistics.median(part) / 1e6 for part in parts)
    return plan_ms, apply_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-model-len", type=int, default=8192)
    max_model_len = parser.parse_args().max_model_len
    print("running  waiting   plan   results")
    for num_running, num_waiting in ((1, 0), (16, 0), (64, 0), (256, 0), (256, 10_000)):
        scheduler = scheduler_of(num_running, num_running * 512, max_model_len)
        add(scheduler, "r", prompts(num_running, 64))
        add(scheduler, "w", prompts(num_waiting, 64))
        plan_ms, apply_ms = measure(scheduler)
        print(f"{num_running:7}  {num_waiting:7}  {plan_ms:5.3f}  {apply_ms:8.3f}")
    print("\nrunning  waiting, for blocks  prompts that wait   plan   results")
    for length in (64, 2048, max_model_len - 1):
        scheduler = scheduler_of(256, 200 * 24, max_model_len)
        add(scheduler, "r", prompts(200, 64))
        scheduler.schedule()
        add(scheduler, "w", prompts(10_000 if length < 100 else 500, length))
        plan_ms, apply_ms = measure(scheduler)
        stats = scheduler.stats()
        print(f"{stats.num_running:7}  {stats.num_waiting:19}  {length:17}  ", end="")
        print(f"{plan_ms:5.3f}  {apply_ms:8.3f}")


if __name__ == "__main__":
    main()
