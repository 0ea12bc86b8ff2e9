"""Run by test_captured_steps.py: one rank of a Worker replica on random plans; the output rank
writes its StepResults. Arguments: model directory, tp size, pp size, the most rows of a step that
is captured, result file."""

import sys
from pathlib import Path

import msgspec
from support.decode_plans import BLOCK_SIZE, BLOCKS_OF_ONE, random_plans
from support.plans import run_plans
from support.ranks import HOST, agree_on_port, rank_of_this_process

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.layout import ParallelLayout
from aioengine.worker import graphs
from aioengine.worker.runner import Worker

NUM_SLOTS = 4


def main() -> None:
    model, tp_size, pp_size, max_rows, path = sys.argv[1:]
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        device="cpu",
        cpu_threads=1,
        tensor_parallel_size=int(tp_size),
        pipeline_parallel_size=int(pp_size),
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
    )
    graphs.MAX_ROWS = int(max_rows)  # type: ignore[misc]
    layout = ParallelLayout(tp_size=config.tensor_parallel_size, pp_size=int(pp_size))
    source = resolve_model(model)
    rank = rank_of_this_process()
    worker = Worker(
        config,
        layout,
        rank,
        read_model_config(source),
        source,
        local_rank=rank,
        local_world_size=layout.world_size,
    )
    worker.call("open_device", {})
    port = agree_on_port(lambda: worker.call("open_store", {"host": HOST}))
    worker.call("open_groups", {"host": HOST, "port": port})
    worker.call("load_model", {})
    worker.call("allocate_kv", {"num_blocks": 1 + NUM_SLOTS * BLOCKS_OF_ONE})
    worker.call("warm_up", {})
    plans = random_plans(NUM_SLOTS, 150, num_logprobs=512, seed=5)
    results = run_plans(worker, plans, config.max_plans_in_flight - 1)
    found = [rows for rows, graph in worker._graphs._graphs.items() if graph is not None]
    assert not worker._graphs._refused
    assert len(found) >= min(int(max_rows), NUM_SLOTS - 1), found
    worker.call("close", {})
    if results:
        Path(path).write_bytes(msgspec.msgpack.encode(results))


if __name__ == "__main__":
    main()
