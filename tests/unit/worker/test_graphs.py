"""Captured steps give the same bits as computed ones, and what cannot be captured is not."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numba import carray, njit
from support.decode_plans import BLOCK_SIZE, BLOCKS_OF_ONE, random_plans
from support.launching import STORIES
from support.plans import GREEDY, ScriptedRequest, run_plans
from torch import Tensor

from aioengine.activity import Activity
from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.dist.groups import GroupCoordinator
from aioengine.errors import RankLostError
from aioengine.kernels.codegen import pointer
from aioengine.kernels.team import Team
from aioengine.layers.attention import attention_backend
from aioengine.layers.forward_batch import ForwardBatch, PagedInputs
from aioengine.layout import ParallelLayout
from aioengine.messages import RemoteCall, StepPlan
from aioengine.rpc import encode_arguments
from aioengine.timeline.breakdown import own_times
from aioengine.timeline.probe import Kind, Lane
from aioengine.timeline.recorder import Recorder, spans_of
from aioengine.worker import graphs
from aioengine.worker.capture import Capture
from aioengine.worker.graphs import StepGraphs
from aioengine.worker.kv_store import KVShape
from aioengine.worker.runner import Worker

pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/models here")
NUM_SLOTS = 6
STATUS_0 = np.zeros(1, np.int64)

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


@pytest.mark.parametrize("num_threads", [1, 3])
def test_contexts_of_any_lengths(num_threads: int) -> None:
    """Rows that are cut into parts in some steps and not in others; tables get wider."""
    num_rows, num_heads, num_kv, head_dim, num_blocks = 3, 6, 2, 32, 601
    shape = KVShape(range(1), BLOCK_SIZE, num_kv, head_dim, torch.bfloat16)
    team, tp = Team(num_threads), GroupCoordinator("tp", (0,), 0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    attend, caches = [], []
    for _ in range(2):
        backend = attention_backend("cpu", BLOCK_SIZE, team)
        caches.append(shape.allocate(num_blocks, torch.device("cpu"), backend)[0])
        attend.append(backend.begin)

    def compute(batch: ForwardBatch, hidden_TD: Tensor | None) -> Tensor:
        assert hidden_TD is not None
        cache = batch.kv_caches[0]
        x_TMH = hidden_TD.view(num_rows, -1, head_dim)
        q_TNH, k_TKH, v_TKH = x_TMH.split_with_sizes((num_heads, num_kv, num_kv), dim=1)
        batch.attention.write_kv(cache, k_TKH, v_TKH)
        return batch.attention.attend(cache, q_TNH)

    nothing = torch.nn.Identity()
    step_graphs = StepGraphs(nothing, compute, [], team=team, tp=tp, activity=Activity())
    for lens in ([5, 40, 900], [600, 1, 33], [1700, 2900, 16], [17, 2000, 2000], [1, 1, 1]):
        tables = torch.arange(1, num_blocks).view(num_rows, -1)[:, : max(lens) // BLOCK_SIZE + 1]
        positions_T = torch.tensor(lens) - 1
        slots_T = tables[range(num_rows), positions_T // BLOCK_SIZE] * BLOCK_SIZE
        slots_T += positions_T % BLOCK_SIZE
        inputs = PagedInputs(
            slots_T, tables, positions_T + 1, (1,) * num_rows, tuple(lens), num_rows, BLOCK_SIZE
        )
        x_TD = torch.randn(num_rows, (num_heads + 2 * num_kv) * head_dim, generator=generator)
        computed, repeated = (
            run(ForwardBatch(None, positions_T, begin(inputs), {0: cache}), x_TD.bfloat16())
            for run, begin, cache in zip((compute, step_graphs.run), attend, caches, strict=True)
        )
        assert torch.equal(computed, repeated)
    assert step_graphs._graphs[num_rows] is not None


def decodes(worker: Worker, recorder: Recorder) -> list[list[tuple[Kind, int, int]]]:
    """The spans of each of five steps with two rows."""
    requests = [ScriptedRequest(slot, 1, GREEDY, 1 + slot, BLOCK_SIZE) for slot in (0, 1)]
    new = tuple(request.new for request in requests)
    prefill = StepPlan(new, tuple(request.step([5, 6]) for request in requests), True)
    steps = [StepPlan((), tuple(request.step() for request in requests), True) for _ in range(5)]
    recorder.install(Lane.DEVICE, worker.probes())
    run_plans(worker, [prefill, *steps], 1)
    recorder.remove(Lane.DEVICE)
    found = spans_of(recorder.result())
    return [
        [
            (kind, began_ns, ended_ns)
            for kind, _, began_ns, ended_ns in found
            if note.began_ns <= began_ns and ended_ns <= note.ended_ns
        ]
        for note in recorder.steps[1:]
    ]


def test_a_recording_shows_the_same_spans(make_worker: MakeWorker) -> None:
    """The first step is computed, the second captured, the others are repeated."""
    worker = make_worker(dtype="float32", cpu_threads=1)
    computed, captured, *repeated = decodes(worker, Recorder())
    kinds = [sorted(kind for kind, _, _ in spans) for spans in (computed, captured, *repeated)]
    assert all(found == kinds[0] for found in kinds)
    assert kinds[0].count(Kind.ATTENTION) == 2 * 5
    for spans in repeated:
        own_ns = own_times((kind, Lane.DEVICE, began, end) for kind, began, end in spans)
        assert min(own for _, own in own_ns) >= 0, "spans lie in each other"
    assert worker._graphs.on_spans is None, "nothing is left behind"


def test_what_torch_computes_is_not_captured(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is it tried again."""
    worker = make_worker(dtype="float32", cpu_threads=1)
    norm = worker.stage.model.norm
    assert norm is not None
    monkeypatch.setattr(norm, "forward", lambda x_TD: x_TD * 2)
    caplog.set_level("INFO")
    decodes(worker, Recorder())
    assert "steps of 2 rows are not captured: torch computes aten.mul.Tensor" in caplog.text
    assert caplog.text.count("not captured") == 1
    assert worker._graphs._graphs[2] is None


def test_hooks_are_called_and_replaced_weights_count(make_worker: MakeWorker) -> None:
    """Those that a method of `collective_rpc` registers, or replaces."""
    worker = make_worker(dtype="float32", cpu_threads=1)
    request, calls = ScriptedRequest(0, 1, GREEDY, 1, BLOCK_SIZE), []

    def decode(first_seq: int, num_steps: int = 3) -> None:
        for seq in range(first_seq, first_seq + num_steps):
            worker.execute(seq, StepPlan((), (request.step(),), True))

    worker.execute(1, StepPlan((request.new,), (request.step([5, 6]),), True))
    decode(2)
    before = worker._graphs._graphs[1]
    hook = worker.stage.model.register_forward_hook(lambda *_: calls.append(1))
    rank_info = RemoteCall("rank_info", encode_arguments((), {}))
    worker.remote(5, rank_info)
    decode(6)
    assert len(calls) == 3
    hook.remove()
    worker.remote(9, rank_info)
    decode(10)
    assert len(calls) == 3
    assert worker._graphs._graphs[1] not in (None, before)


def test_a_result_that_no_call_computes_is_no_number(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever slips past the guard (here, a kernel called directly) shows at once."""
    worker = make_worker(dtype="float32", cpu_threads=1)
    assert worker._team is not None
    call, logits = worker._team.call, worker.stage.compute_logits

    def unseen(*args: Any) -> None:
        capture, worker._team.capture = worker._team.capture, None
        call(*args)
        worker._team.capture = capture

    def compute_logits(hidden_RD: Tensor) -> Tensor:
        monkeypatch.setattr(worker._team, "call", unseen)
        result = logits(hidden_RD)
        monkeypatch.setattr(worker._team, "call", call)
        return result

    monkeypatch.setattr(worker.stage, "compute_logits", compute_logits)
    request = ScriptedRequest(0, 1, GREEDY, 1, BLOCK_SIZE)
    plans = [StepPlan((request.new,), (request.step([5, 6]),), True)]
    plans += [StepPlan((), (request.step(),), True) for _ in range(2)]
    worker._graphs._graphs[1] = None
    *computed, repeated = run_plans(worker, plans, 1)
    assert all(not result.sampled[0].error for result in computed)
    assert "not finite" in repeated.sampled[0].error


@njit
def failing_if(address: int) -> int:
    """What is at the address."""
    return carray(pointer(address), 1, np.int64)[0]


def test_where_a_repeated_step_is(make_worker: MakeWorker) -> None:
    """As heartbeats see it. After a failure it stays what failed, as after a collective."""
    team, activity = Team(1), Activity()
    tp = GroupCoordinator("tp", (0,), 0, device=torch.device("cpu"))
    status = np.zeros(1, np.int64)

    def fail(status: int) -> None:
        assert activity.look() == ("all_reduce of tp:0", "all_reduce of tp:0")
        raise RankLostError(f"status {status}")

    def compute(batch: ForwardBatch, hidden_TD: Tensor | None) -> Tensor:
        capture = team.capture
        if isinstance(capture, Capture):
            with activity.operating("all_reduce of tp:0"):
                capture.note_call(failing_if, [status.ctypes.data], fail)
            with activity.operating("all_gather of tp:0"):
                capture.note_call(failing_if, [STATUS_0.ctypes.data], fail)
        return torch.empty(1)

    step_graphs = StepGraphs(torch.nn.Identity(), compute, [], team=team, tp=tp, activity=activity)
    batch = ForwardBatch(None, torch.zeros(3, dtype=torch.int64), Mock(), {})
    for _ in range(3):
        step_graphs.run(batch, None)
    assert activity.look() == (None, "all_gather of tp:0")
    status[0] = 3
    with activity.within("step 1", 1):
        with pytest.raises(RankLostError, match="status 3"):
            step_graphs.run(batch, None)
        assert activity.look() == ("all_reduce of tp:0", "all_reduce of tp:0")
    assert activity.look()[0] is None
