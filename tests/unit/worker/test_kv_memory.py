"""How many KV blocks a rank takes, and what it says when they are too few."""

import os
from pathlib import Path

import msgspec
import pytest
import torch
from support.launching import STORIES

from aioengine.checkpoint.source import read_model_config, resolve_model
from aioengine.config import EngineConfig
from aioengine.errors import StartupError
from aioengine.layers.attention import GATHER
from aioengine.layout import ParallelLayout
from aioengine.model_config import ModelConfig, RopeConfig
from aioengine.worker.kv_store import KVShape
from aioengine.worker.memory import (
    KVBudget,
    Memory,
    cpu_kv_budget,
    cuda_kv_budget,
    free_cpu_bytes,
    num_kv_blocks,
)
from aioengine.worker.runner import Worker

CPU = torch.device("cpu")
GIB = 2**30
MODEL = ModelConfig(
    family="llama",
    name="tiny",
    hidden_size=72,
    intermediate_size=10,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    vocab_size=10,
    max_position=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)


def blocks(budget: int, **settings: int) -> int:
    """For a model of 64 positions and blocks of 1000 bytes."""
    config = EngineConfig(block_size=16, max_num_seqs=8, **settings)
    length = config.max_model_len or 64
    granted = KVBudget(budget, "as granted")
    return num_kv_blocks(config, budget=granted, block_bytes=1000, max_model_len=length)


def test_the_budget_counts() -> None:
    assert blocks(20_999) == 20


def test_not_more_than_all_requests_need() -> None:
    assert blocks(10**9) == 1 + 8 * 4


def test_given_bytes_are_taken_in_full() -> None:
    assert blocks(10**6, kv_cache_memory_bytes=10**6) == 1000


def test_one_block_is_enough_for_a_model_without_a_given_length() -> None:
    assert blocks(2000) == 2
    with pytest.raises(
        StartupError, match=r"a single block needs 2000 bytes .* only 1999 .*granted"
    ):
        blocks(1999)


def test_a_given_length_must_fit() -> None:
    assert blocks(4000, max_model_len=48) == 4
    with pytest.raises(StartupError, match=r"--max-model-len 48 needs 4000 bytes .* only 3999"):
        blocks(3999, max_model_len=48)


def test_ranks_of_a_node_share_its_memory() -> None:
    assert cpu_kv_budget(8 * GIB, 1).num_bytes == 2 * GIB
    shared = cpu_kv_budget(8 * GIB, 4)
    assert shared.num_bytes == GIB // 2
    assert shared.reason == "25% of 8.00 GiB free memory over 4 ranks of this node"
    assert cpu_kv_budget(1000 * GIB, 2).num_bytes == 4 * GIB


def test_cuda_keeps_what_is_in_use_and_what_a_step_needs() -> None:
    budget = cuda_kv_budget(80 * GIB, 60 * GIB, step_bytes=2 * GIB, utilization=0.9)
    assert budget.num_bytes == 50 * GIB
    assert "0.9 of 80.00 GiB, less 20.00 GiB in use and 2.00 GiB" in budget.reason
    assert cuda_kv_budget(80 * GIB, GIB, step_bytes=0, utilization=0.5).num_bytes == 0


def test_weights_and_given_bytes_must_fit_beside_the_other_ranks() -> None:
    memory = Memory(CPU, 8 * GIB, num_sharing=2)
    memory.check_weights(4 * GIB, torch.float32)
    with pytest.raises(StartupError, match=r"4\.00 GiB in torch.float32, but the 2 ranks .* 8\.00"):
        memory.check_weights(4 * GIB + 1, torch.float32)
    config = EngineConfig(kv_cache_memory_bytes=3 * GIB)
    assert memory.kv_budget(config).num_bytes == 3 * GIB
    alone = Memory(CPU, 2 * GIB, num_sharing=1)
    with pytest.raises(StartupError, match=r"--kv-cache-memory-bytes 3221225472 .* 2\.00 GiB are"):
        alone.kv_budget(config)


def test_without_flags_a_share_of_this_machine_is_taken() -> None:
    memory = Memory.measure(CPU, 1000)
    assert 0 < memory.kv_budget(EngineConfig()).num_bytes < memory.free / 1000


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 1024000),
        ("0::/job/step\n", {"job": (5000, 4000, 300)}, 1300),
        ("0::/job/step\n", {"job": (5000, 4000, 300), "job/step": ("max", 10, 0)}, 1300),
        ("0::/job/step\n", {"job": (5000, 4000, 0), "job/step": (500, 700, 100)}, 0),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job": (5000, 4000, 300)}, 1300),
        ("4:cpu:/job\n", {"memory/job": (5000, 4000, 300)}, 1024000),
    ],
)
def test_control_groups_count(
    tmp_path: Path, cgroup: str, files: dict[str, tuple[object, int, int]], expected: int
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:  1000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, (limit, used, pages) in files.items():
        directory = tmp_path / "cgroup" / name
        directory.mkdir(parents=True, exist_ok=True)
        first = name.startswith("memory/")
        (directory / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
        (directory / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}")
        prefix = "total_" if first else ""
        (directory / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file {pages}\n")
    assert free_cpu_bytes(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_cache_of_a_tensor_parallel_stage() -> None:
    shape = KVShape.of(
        MODEL, range(1, 3), tp_rank=1, tp_size=2, block_size=16, dtype=torch.bfloat16
    )
    caches = shape.allocate(5, torch.device("cpu"), GATHER)
    assert list(caches) == [1, 2]
    assert caches[1].k.shape == (5, 16, 2, 8)  # 3 kv heads over 2 ranks: 2 each, 1 of them padding
    assert sum(c.k.nbytes + c.v.nbytes for c in caches.values()) == 5 * shape.block_bytes


@pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")
@pytest.mark.parametrize("num_blocks", [3, 9])
def test_what_is_allocated_follows_the_cache_not_the_model_s_positions(
    num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A table of blocks for this model's positions would take 2 TB; and the log says what fits."""
    source = resolve_model(str(STORIES))
    model = msgspec.structs.replace(read_model_config(source), max_position=2**34)
    config = EngineConfig(
        model=str(STORIES), device="cpu", max_num_seqs=256, max_num_batched_tokens=256
    )
    worker = Worker(config, ParallelLayout(), 0, model, source, local_rank=0, local_world_size=1)
    caplog.set_level("INFO")
    worker.call("open_device", {})
    worker.call("load_model", {})
    worker.call("allocate_kv", {"num_blocks": num_blocks})
    worker.call("warm_up", {})
    room = (num_blocks - 1) * config.block_size
    assert f"what fits the KV cache: {room} tokens of the model's {2**34}" in caplog.text


@pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")
@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(64, 5), (None, 100)])
def test_a_context_that_is_not_cut_is_not_mentioned(
    max_model_len: int | None, num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = resolve_model(str(STORIES))
    config = EngineConfig(model=str(STORIES), device="cpu", max_model_len=max_model_len)
    model = read_model_config(source)
    worker = Worker(config, ParallelLayout(), 0, model, source, local_rank=0, local_world_size=1)
    caplog.set_level("INFO")
    worker.call("open_device", {})
    worker.call("allocate_kv", {"num_blocks": num_blocks})
    assert "the context is" not in caplog.text


def test_pages_of_the_cache_come_when_they_are_written() -> None:
    """Even when what was freed before would be large enough."""
    shape = KVShape(range(4), 16, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    num_blocks = 2**26 // shape.block_bytes
    freed = [bytearray(b"x" * 2**20) for _ in range(80)]
    del freed
    before = resident_bytes()
    caches = shape.allocate(num_blocks, torch.device("cpu"), GATHER)
    assert resident_bytes() - before < 2**22
    caches[3].k[-1] = 1
    assert caches[3].k[0].abs().max() == 0
    assert caches[3].k[-1].min() == 1


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
