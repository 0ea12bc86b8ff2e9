"""Run by test_transformers.py: one rank of a Worker replica that computes scripted steps of several
checkpoints, one after the other; the output rank writes the logits it samples from.

Arguments: directory of checkpoints, tp size, pp size, directory for the results, then flags of
EngineConfig as name=value."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.plans import GREEDY, ScriptedRequest
from support.ranks import HOST, agree_on_port, rank_of_this_process
from torch import Tensor

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.layout import ParallelLayout
from aioengine.messages import StepPlan
from aioengine.worker.runner import Worker

BLOCK_SIZE = 4
PROMPTS = (29, 6, 17)
"""Tokens of each request that are prefilled; NUM_DECODES more follow one by one."""
NUM_DECODES = 5
CHUNKS = ((29,), (1, 5), (7, 4, 6))
"""How each prompt is cut."""


def token_ids(request: int, vocab_size: int) -> list[int]:
    """What the request's tokens are, whatever the model would have said."""
    generator = torch.Generator().manual_seed(100 + request)
    length = PROMPTS[request] + NUM_DECODES
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def scripted_steps(vocab_size: int) -> list[tuple[StepPlan, list[tuple[int, int]]]]:
    """Plans, each with the (request, position) of the logits that it makes, in the order of rows.

    Every chunk samples. Requests that are shorter in chunks decode beside the others' prefill.
    """
    requests = [
        ScriptedRequest(slot, 1, GREEDY, 1 + 16 * slot, BLOCK_SIZE) for slot in range(len(PROMPTS))
    ]
    pieces = []
    for number, chunks in enumerate(CHUNKS):
        ids = token_ids(number, vocab_size)
        start = 0
        pieces.append([])
        for size in (*chunks, *(1,) * NUM_DECODES):
            pieces[-1].append((start, ids[start : start + size]))
            start += size
    steps = []
    for step in range(max(map(len, pieces))):
        active = [n for n, parts in enumerate(pieces) if step < len(parts)]
        plan = StepPlan(
            tuple(request.new for request in requests) if step == 0 else (),
            tuple(requests[n].step(pieces[n][step][1]) for n in active),
        )
        active.sort(key=lambda n: len(pieces[n][step][1]) > 1)  # rows: single tokens first
        rows = [(n, pieces[n][step][0] + len(pieces[n][step][1]) - 1) for n in active]
        steps.append((plan, rows))
    return steps


def compute_logits(
    model: Path, tp_size: int, pp_size: int, rank: int, flags: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """By "request.position"; empty on ranks that compute no logits."""
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        cpu_threads=1,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        **(flags or {}),
    )
    layout = ParallelLayout(tp_size=tp_size, pp_size=pp_size)
    source = resolve_model(str(model))
    cfg = read_model_config(source)
    worker = Worker(
        config, layout, rank, cfg, source, local_rank=rank, local_world_size=layout.world_size
    )
    worker.call("open_device", {})
    if layout.world_size > 1:
        port = agree_on_port(lambda: worker.call("open_store", {"host": HOST}), key=model.name)
        worker.call("open_groups", {"host": HOST, "port": port})
    worker.call("load_model", {})
    worker.call("allocate_kv", {"num_blocks": 1 + 16 * len(PROMPTS)})

    rows_seen: list[Tensor] = []
    stage = worker.stage
    compute = stage.compute_logits

    def recorded(hidden_RD: Tensor) -> Tensor:
        rows_seen.append(compute(hidden_RD))
        return rows_seen[-1].clone()

    stage.compute_logits = recorded
    logits = {}
    for seq, (plan, rows) in enumerate(scripted_steps(cfg.vocab_size)):
        worker.prepare(seq, plan)
        worker.execute(seq, plan)
        if rows_seen:
            found = rows_seen.pop()
            logits |= {
                f"{n}.{position}": row for (n, position), row in zip(rows, found, strict=True)
            }
    worker.call("close", {})
    return logits


def main() -> None:
    models, tp_size, pp_size, results, *settings = sys.argv[1:]
    flags = dict(setting.split("=", 1) for setting in settings)
    for model in sorted(Path(models).iterdir()):
        logits = compute_logits(model, int(tp_size), int(pp_size), rank_of_this_process(), flags)
        if logits:
            name = f"{model.name}.{rank_of_this_process()}.safetensors"
            save_file({key: row.contiguous() for key, row in logits.items()}, Path(results) / name)


if __name__ == "__main__":
    main()
