"""A rank's own state does not grow with the requests that have ended."""

import random
from collections import deque

import pytest
from support.containers import container_sizes
from support.launching import STORIES

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.core.blocks import BlockPool
from aioengine.core.scheduler import Scheduler
from aioengine.layout import ParallelLayout
from aioengine.messages import AddRequest, ChoiceParams, StepPlan
from aioengine.worker.runner import Worker

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

NUM_BLOCKS = 100
TOLERANCE = 30
RULES = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"frequency_penalty": 0.5},
    {"logit_bias": ((5, -100.0),), "prompt_logprobs": 1},
    {"min_tokens": 2, "stop_token_ids": (2,)},
]


def loaded_worker() -> Worker:
    config = EngineConfig(
        model=str(STORIES), device="cpu", cpu_threads=1, max_num_seqs=16, max_num_batched_tokens=256
    )
    source = resolve_model(config.model)
    model = read_model_config(source)
    worker = Worker(config, ParallelLayout(), 0, model, source, local_rank=0, local_world_size=1)
    worker.call("open_device", {})
    worker.call("load_model", {})
    worker.call("allocate_kv", {"num_blocks": NUM_BLOCKS})
    return worker


def serve(worker: Worker, scheduler: Scheduler, numbers: range, first_seq: int) -> int:
    """Requests of all kinds, to their ends, two plans in flight. Returns the next free seq."""
    draw = random.Random(numbers.start)
    for number in numbers:
        prompt = tuple(draw.randrange(3, 500) for _ in range(12 + number % 9))
        params = ChoiceParams(max_tokens=1 + number % 4, **RULES[number % len(RULES)])
        scheduler.add(
            AddRequest(request_id=str(number), token_ids=prompt, params=params), "front end"
        )
    in_flight: deque[tuple[int, StepPlan]] = deque()
    seq = first_seq
    while scheduler.num_unfinished or in_flight:
        while len(in_flight) < 2 and not (plan := scheduler.schedule()).is_empty:
            in_flight.append((seq, plan))
            seq += 1
        result = worker.execute(*in_flight.popleft())
        assert result is not None
        scheduler.apply(result)
        scheduler.take_admitted()
    return seq


def sizes(worker: Worker, scheduler: Scheduler) -> dict[str, int]:
    """Without captured steps, of which there is one for each number of rows at most."""
    assert len(worker._graphs._graphs) <= 16
    worker._graphs._graphs.clear()
    return container_sizes(worker, scheduler)


def test_nothing_grows_with_finished_requests() -> None:
    worker = loaded_worker()
    pool = BlockPool(NUM_BLOCKS, 16, enable_prefix_caching=True)
    scheduler = Scheduler(
        pool,
        num_slots=16,
        num_stages=1,
        max_num_batched_tokens=256,
        max_model_len=512,
        async_scheduling=True,
    )
    seq = serve(worker, scheduler, range(150), 1)
    before = sizes(worker, scheduler)
    assert before["Request.token_ids"] == 0
    assert before["BlockPool._digests"] > 0
    serve(worker, scheduler, range(150, 450), seq)
    after = sizes(worker, scheduler)
    grown = {name: size - before[name] for name, size in after.items()}
    assert {name: more for name, more in grown.items() if more > TOLERANCE} == {}
