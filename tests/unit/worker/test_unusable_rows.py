"""A request whose logits are NaN ends alone: nothing changes beside it, or after it in its slot and
blocks."""

import math
from typing import Any

import msgspec
import pytest
from support.launching import STORIES
from support.plans import GREEDY, ScriptedRequest, run_plans
from torch import nn

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.layout import ParallelLayout
from aioengine.messages import PromptLogprobs, Sampled, StepPlan
from aioengine.worker.runner import Worker

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

POISON = 7
"""The token whose embedding is NaN."""
BLOCK_SIZE = 16
ASKS: dict[str, Any] = {
    "temperature": 1.0,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "num_prompt_tokens": 4,
}


@pytest.fixture(scope="module")
def worker() -> Worker:
    config = EngineConfig(
        model=str(STORIES), dtype="float32", device="cpu", cpu_threads=1, max_num_seqs=4
    )
    source = resolve_model(config.model)
    model = read_model_config(source)
    worker = Worker(config, ParallelLayout(), 0, model, source, local_rank=0, local_world_size=1)
    for method in ("open_device", "load_model"):
        worker.call(method, {})
    worker.call("allocate_kv", {"num_blocks": 30})
    stage = worker.stage
    assert stage.lm_head is not None
    assert stage.model.embed_tokens is not None
    poisoned = stage.lm_head.weight.clone()
    poisoned[POISON] = math.nan
    stage.model.embed_tokens.weight = nn.Parameter(poisoned, requires_grad=False)
    return worker


def run(
    worker: Worker, *prompts: tuple[int, list[int], int]
) -> list[tuple[list[Sampled], list[PromptLogprobs]]]:
    """Requests (slot, prompt, epoch) in one prefill and two decodes, what each slot got."""
    params = msgspec.structs.replace(GREEDY, **ASKS)
    requests = [
        ScriptedRequest(slot, epoch, params, 1 + 8 * slot, BLOCK_SIZE) for slot, _, epoch in prompts
    ]
    steps = [r.step(prompt) for r, (_, prompt, _) in zip(requests, prompts, strict=True)]
    plans = [StepPlan(tuple(r.new for r in requests), tuple(steps), share_sampled=True)]
    plans += [
        StepPlan((), tuple(request.step() for request in requests), share_sampled=True)
        for _ in range(2)
    ]
    results = run_plans(worker, plans, 1)
    return [
        (
            [one for result in results for one in result.sampled if one.slot == slot],
            [part for result in results for part in result.prompt_logprobs if part.slot == slot],
        )
        for slot, _, _ in prompts
    ]


def test_a_poisoned_request_disturbs_no_other(worker: Worker) -> None:
    """All of them with penalties and prompt log probabilities."""
    good, other = [1, 403, 407, 261], [1, 10, 407, 261]
    healthy, _ = run(worker, (0, good, 1), (1, other, 1))
    beside, (bad, bad_prompt) = run(worker, (0, good, 2), (1, [1, POISON, 407, 261], 2))
    assert values(beside) == values(healthy)
    assert all("not finite" in one.error and not one.token_ids for one in bad)
    assert math.isnan(bad_prompt[0].logprobs[-1].logprob)
    _, after = run(worker, (0, other, 3), (1, good, 3))
    assert values(after)[0] == values(healthy)[0]
    assert values(after)[1] == pytest.approx(values(healthy)[1], abs=1e-5)


def values(found: tuple[list[Sampled], list[PromptLogprobs]]) -> tuple[list[int], list[float]]:
    """Drawn ids, and log probabilities of all tokens."""
    sampled, prompt = found
    described = [one for part in (*sampled, *prompt) for one in part.logprobs]
    return [one.token_ids[0] for one in sampled], [one.logprob for one in described]
