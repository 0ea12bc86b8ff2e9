"""A decode step on CUDA, with torch's own watch over what makes the host wait."""

import pytest
import torch
from support.launching import STORIES
from support.plans import EVERY_RULE, plans_with_every_rule, run_plans

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.layout import ParallelLayout
from aioengine.worker.runner import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model"),
]


def test_no_operation_of_a_step_waits() -> None:
    """The one read, of what was drawn, waits for an event of its own, which the watch allows."""
    config = EngineConfig(
        model=str(STORIES), device="cuda", dtype="float32", max_num_seqs=8, block_size=16
    )
    source = resolve_model(config.model)
    model = read_model_config(source)
    worker = Worker(config, ParallelLayout(), 0, model, source, local_rank=0, local_world_size=1)
    worker.call("open_device", {})
    worker.call("load_model", {})
    worker.call("allocate_kv", {"num_blocks": 99})
    worker.call("warm_up", {})
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run_plans(worker, plans_with_every_rule(16), 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(result.sampled) for result in results] == [len(EVERY_RULE)] * 4
