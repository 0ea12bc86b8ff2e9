"""A step never makes the host wait for the device, but for one read of what was drawn.

Shown without an accelerator: the step runs on torch's meta device, whose tensors have no values, so
reading one raises; and every copy from the host must be one that does not block.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from support.launching import STORIES
from support.plans import (
    EVERY_RULE,
    GREEDY,
    ScriptedRequest,
    plans_with_every_rule,
    run_plans,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.dist.groups import GroupCoordinator
from aioengine.layout import ParallelLayout
from aioengine.messages import StepPlan
from aioengine.worker import prompt_logprobs, runner, sampler
from aioengine.worker.memory import Memory
from aioengine.worker.runner import Worker

pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")

META = torch.device("meta")
BLOCK_SIZE = 16
COPIES = (torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.copy_)
SCALAR_WHERE = (
    torch.ops.aten.where.Scalar,
    torch.ops.aten.where.ScalarSelf,
    torch.ops.aten.where.ScalarOther,
)


class NoBlockingCopies(TorchDispatchMode):
    """Every operation is on one device; what crosses over does not block."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        assert func not in SCALAR_WHERE, f"{func} copies its number to the device and waits"
        result = func(*args, **kwargs)
        devices = {
            leaf.device.type
            for leaf in tree_leaves((args, kwargs, result))
            if isinstance(leaf, Tensor)
        }
        if devices == {"cpu", "meta"}:
            assert func.overloadpacket in COPIES, f"{func} mixes devices"
            assert kwargs.get("non_blocking") or True in args[2:], f"{func} blocks"
        return result


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each read from the device took; zeros come back."""
    sizes: list[int] = []

    def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes.append(len(tensors))
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    monkeypatch.setattr(sampler, "fetch", fetch)
    monkeypatch.setattr(prompt_logprobs, "fetch", fetch)
    return sizes


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Loaded, with a cache, on a device whose tensors have no values."""
    monkeypatch.setattr(runner, "select_device", lambda *_: META)
    monkeypatch.setattr(runner, "device_id", lambda device: device.type)
    monkeypatch.setattr(Memory, "measure", lambda *_: Memory(META, 2**40, 1))
    monkeypatch.setattr(GroupCoordinator, "exercise", lambda *_: None)  # reads what it gets
    config = EngineConfig(
        model=str(STORIES), max_num_seqs=8, max_num_batched_tokens=64, block_size=BLOCK_SIZE
    )
    source = resolve_model(config.model)
    model = read_model_config(source)
    worker = Worker(config, ParallelLayout(), 0, model, source, local_rank=0, local_world_size=1)
    for method, arguments in (
        ("open_device", {}),
        ("load_model", {}),
        ("allocate_kv", {"num_blocks": 99}),
    ):
        worker.call(method, arguments)
    return worker


def test_a_step_reads_the_device_once(
    worker: Worker, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "tensor", None)  # torch.tensor(…, device=…) blocks
    with NoBlockingCopies():
        results = run_plans(worker, plans_with_every_rule(BLOCK_SIZE), 1)
    assert [len(result.sampled) for result in results] == [len(EVERY_RULE)] * 4
    assert fetched == [5] * 4, "ids, and what the log probabilities need, in one read"


def test_prompt_logprobs_take_one_read_more(worker: Worker, fetched: list[int]) -> None:
    params = msgspec.structs.replace(GREEDY, num_prompt_tokens=5, prompt_logprobs=2)
    request = ScriptedRequest(0, 1, params, 1, BLOCK_SIZE)
    plan = StepPlan((request.new,), (request.step([1, 2, 3, 4, 5]),))
    with NoBlockingCopies():
        worker.prepare(0, plan)
        worker.execute(0, plan)
    assert fetched == [1, 4]
