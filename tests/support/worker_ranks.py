"""Run by test_layouts.py: one rank of a Worker replica on hand-made plans; the output rank writes
its StepResults. Arguments: model directory, tp size, pp size, result file."""

import sys
from pathlib import Path

import msgspec
from support.plans import lockstep_plans, run_plans
from support.ranks import HOST, agree_on_port, rank_of_this_process

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.layout import ParallelLayout
from aioengine.messages import StepResult
from aioengine.worker.runner import Worker


def run_worker(model: str, tp_size: int, pp_size: int, rank: int) -> list[StepResult]:
    """Every start-up call, the plans, and the end, as a leader would ask for them."""
    config = EngineConfig(
        model=model,
        dtype="float32",
        device="cpu",
        cpu_threads=1,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        block_size=4,
    )
    layout = ParallelLayout(tp_size=tp_size, pp_size=pp_size)
    source = resolve_model(model)
    model_config = read_model_config(source)
    worker = Worker(
        config,
        layout,
        rank,
        model_config,
        source,
        local_rank=rank,
        local_world_size=layout.world_size,
    )
    worker.call("open_device", {})
    if layout.world_size > 1:
        port = agree_on_port(lambda: worker.call("open_store", {"host": HOST}))
        worker.call("open_groups", {"host": HOST, "port": port})
    worker.call("load_model", {})
    worker.call("allocate_kv", {"num_blocks": 128})
    worker.call("warm_up", {})
    plans = lockstep_plans(config, num_logprobs=model_config.vocab_size)
    results = run_plans(worker, plans, config.max_plans_in_flight - 1)
    worker.call("close", {})
    return results


def main() -> None:
    model, tp_size, pp_size, path = sys.argv[1:]
    results = run_worker(model, int(tp_size), int(pp_size), rank_of_this_process())
    if results:
        Path(path).write_bytes(msgspec.msgpack.encode(results))


if __name__ == "__main__":
    main()
