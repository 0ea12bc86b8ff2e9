"""How well a model predicts a text."""

import math
from pathlib import Path
from typing import Any

from support.plans import ScriptedRequest

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.frontend.tokenizer import load_tokenizer
from aioengine.layout import ParallelLayout
from aioengine.messages import SlotParams, StepPlan
from aioengine.worker.runner import Worker

TEXT = Path(__file__).parent.parent / "data" / "pride_and_prejudice.txt"
BLOCK_SIZE = 16


def text_ids(model: str | None, limit: int) -> list[int]:
    """Of the beginning of the text, by the model's own tokenizer."""
    tokenizer = load_tokenizer(resolve_model(model))
    return tokenizer.encode(TEXT.read_text(), add_special_tokens=False)[:limit]


def open_worker(**settings: Any) -> Worker:
    config = EngineConfig(
        device="cpu", cpu_threads=1, max_num_seqs=1, block_size=BLOCK_SIZE, **settings
    )
    source = resolve_model(config.model)
    cfg = read_model_config(source)
    worker = Worker(config, ParallelLayout(), 0, cfg, source, local_rank=0, local_world_size=1)
    worker.call("open_device", {})
    worker.call("load_model", {})
    return worker


def perplexity(token_ids: list[int], **settings: Any) -> float:
    """Of all tokens but the first, for a model and its settings."""
    worker = open_worker(**settings, max_num_batched_tokens=len(token_ids))
    worker.call("allocate_kv", {"num_blocks": 2 + len(token_ids) // BLOCK_SIZE})
    params = SlotParams(
        0.0, 0, 1.0, 0.0, 0, 0, None, num_prompt_tokens=len(token_ids), prompt_logprobs=0
    )
    request = ScriptedRequest(0, 1, params, 1, BLOCK_SIZE)
    result = worker.execute(0, StepPlan((request.new,), (request.step(token_ids),)))
    worker.call("close", {})
    assert result is not None
    (described,) = result.prompt_logprobs
    assert len(described.logprobs) == len(token_ids) - 1
    return math.exp(-sum(each.logprob for each in described.logprobs) / len(described.logprobs))
