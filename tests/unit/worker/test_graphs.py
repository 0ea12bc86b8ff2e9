"""Captured steps give the same bits as computed ones, and what cannot be captured is not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.decode_plans import BLOCK_SIZE, BLOCKS_OF_ONE, random_plans
from support.launching import STORIES
from support.plans import run_plans

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.layout import ParallelLayout
from aioengine.worker import graphs
from aioengine.worker.runner import Worker

pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/models here")
NUM_SLOTS = 6

MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    workers: list[Worker] = []

    def make(**settings: Any) -> Worker:
        config = EngineConfig(
            model=str(STORIES),
            device="cpu",
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=64,
            block_size=BLOCK_SIZE,
            **settings,
        )
        source = resolve_model(config.model)
        model = read_model_config(source)
        worker = Worker(
            config, ParallelLayout(), 0, model, source, local_rank=0, local_world_size=1
        )
        workers.append(worker)
        for method in ("open_device", "load_model"):
            worker.call(method, {})
        worker.call("allocate_kv", {"num_blocks": 1 + NUM_SLOTS * BLOCKS_OF_ONE})
        worker.call("warm_up", {})
        return worker

    yield make
    for worker in workers:
        worker.call("close", {})


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("float16", "int8"), ("bfloat16", "int4")],
)
def test_results_are_the_same_to_the_last_bit(
    make_worker: MakeWorker,
    dtype: str,
    quantization: str,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All log probabilities of tokens drawn in random batches, whose contexts grow."""
    plans = random_plans(NUM_SLOTS, 400, num_logprobs=512, seed=num_threads)
    settings = {"dtype": dtype, "quantization": quantization, "cpu_threads": num_threads}
    captured = make_worker(**settings)
    found = run_plans(captured, plans, 1)
    assert [rows for rows, graph in captured._graphs._graphs.items() if graph] != []
    assert not captured._graphs._refused
    monkeypatch.setattr(graphs, "MAX_ROWS", 0)
    computed = make_worker(**settings)
    assert found == run_plans(computed, plans, 1)
    assert not computed._graphs._graphs
