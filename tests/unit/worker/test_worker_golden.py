"""A Worker on a real small model reproduces the Hugging Face reference in float32."""

import os

import pytest
from support.launching import STORIES, golden
from support.plans import ScriptedRequest, run_plans

from aioengine.activity import IDLE
from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.layout import ParallelLayout
from aioengine.messages import RemoteCall, SlotParams, StepPlan
from aioengine.rpc import decode_value, encode_arguments
from aioengine.worker.runner import Worker

NAME = "stories260k_greedy"
BLOCK_SIZE = 16
pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/models here")


@pytest.fixture(scope="module")
def worker() -> Worker:
    config = EngineConfig(
        model=str(STORIES),
        dtype="float32",
        device="cpu",
        cpu_threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
    )
    source = resolve_model(config.model)
    worker = Worker(
        config,
        ParallelLayout(),
        0,
        read_model_config(source),
        source,
        local_rank=0,
        local_world_size=1,
    )
    assert worker.call("open_device", {}) == "cpu"
    worker.call("load_model", {})
    worker.call("allocate_kv", {"num_blocks": worker.call("num_kv_blocks", {})})
    worker.call("warm_up", {})
    return worker


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_all_requests_at_once(worker: Worker, chunk: int) -> None:
    """Prefill in chunks beside decodes by PREV; tokens and logprobs are the reference's."""
    params = SlotParams(0.0, 0, 1.0, 0.0, 0, 0, 5)
    rows = golden(NAME)
    requests = [
        ScriptedRequest(slot, chunk, params, 1 + 32 * slot, BLOCK_SIZE) for slot in range(len(rows))
    ]
    new = tuple(request.new for request in requests)
    prompts = [list(row["prompt_ids"]) for row in rows]
    num_left = [len(row["token_ids"]) for row in rows]
    plans = []
    while any(num_left):
        steps = []
        for slot, request in enumerate(requests):
            if part := prompts[slot][:chunk]:
                prompts[slot] = prompts[slot][chunk:]
                steps.append(request.step(part, sample=not prompts[slot]))
                num_left[slot] -= not prompts[slot]
            elif num_left[slot]:
                steps.append(request.step())
                num_left[slot] -= 1
        plans.append(StepPlan(new, tuple(steps), share_sampled=True))
        new = ()
    sampled = [one for result in run_plans(worker, plans, 2) for one in result.sampled]
    for slot, row in enumerate(rows):
        mine = [one for one in sampled if one.slot == slot]
        assert [one.token_ids[0] for one in mine] == row["token_ids"]
        found = [one.logprobs[0] for one in mine]
        assert [one.logprob for one in found] == pytest.approx(row["logprobs"], abs=1e-4)
        for one, top5 in zip(found, row["top5"], strict=True):
            assert [logprob for _, logprob in one.top] == pytest.approx(
                [logprob for _, logprob in top5], abs=1e-4
            )


def test_unknown_calls_are_refused(worker: Worker) -> None:
    with pytest.raises(ValueError, match="no device call 'execute'"):
        worker.call("execute", {})


def test_remote_calls_run_with_the_worker(worker: Worker) -> None:
    call = RemoteCall("rank_info", encode_arguments((), {}))
    info = decode_value(worker.remote(9, call))
    assert (info["rank"], info["coords"]) == (0, "dp0 pp0 tp0")
    assert (info["device"], info["dtype"], info["pid"]) == ("cpu", "float32", os.getpid())
    assert worker.remote(9, RemoteCall("rank_info", call.arguments, reply_rank=1)) == b""
    with pytest.raises(ValueError, match="only registered methods may be called here"):
        worker.remote(9, RemoteCall("os:getpid", call.arguments, registered_only=True))
    assert worker.activity.job == IDLE
