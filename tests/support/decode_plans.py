"""Plans of requests that come, decode together and leave, for comparing ways to compute them."""

import random

from support.plans import ScriptedRequest

from aioengine.messages import SlotParams, SlotStep, StepPlan

BLOCK_SIZE = 16
BLOCKS_OF_ONE = 32


def random_plans(num_slots: int, num_plans: int, num_logprobs: int, seed: int) -> list[StepPlan]:
    """Some plans prefill, most decode a random part of what is there, some of that in another
    order; contexts grow past blocks, and slots get further tenants."""
    draw = random.Random(seed)
    params = SlotParams(0.8, 0, 0.95, 0.0, 7, 0, num_logprobs)
    running: dict[int, tuple[ScriptedRequest, int]] = {}
    """By slot: the request, and its tokens so far."""
    plans = []
    for number in range(num_plans):
        new: list[ScriptedRequest] = []
        steps: list[SlotStep] = []
        if len(running) < num_slots and (not running or draw.random() < 0.15):
            slot = draw.choice([slot for slot in range(num_slots) if slot not in running])
            request = ScriptedRequest(slot, number, params, 1 + slot * BLOCKS_OF_ONE, BLOCK_SIZE)
            length = draw.randrange(1, 40)
            steps.append(request.step([draw.randrange(3, 500) for _ in range(length)]))
            running[slot] = request, length
            new.append(request)
        elif len(running) > 1 and draw.random() < 0.1:
            del running[draw.choice(list(running))]
        taken = [slot for slot in running if not any(step.slot == slot for step in steps)]
        if draw.random() < 0.3:
            taken = draw.sample(taken, k=draw.randint(min(1, len(taken)), len(taken)))
        for slot in taken:
            request, length = running[slot]
            steps.append(request.step())
            running[slot] = request, length + 1
        if steps:
            plans.append(
                StepPlan(tuple(request.new for request in new), tuple(steps), share_sampled=True)
            )
        for slot, (_, length) in list(running.items()):
            if length + 1 >= BLOCK_SIZE * BLOCKS_OF_ONE:
                del running[slot]
    return plans
