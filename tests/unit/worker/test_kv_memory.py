"""How many KV blocks a rank takes, and what it says when they are too few."""

import pytest
import torch

from aioengine.config import EngineConfig
from aioengine.errors import StartupError
from aioengine.model_config import ModelConfig, RopeConfig
from aioengine.worker.kv_store import KVShape
from aioengine.worker.memory import kv_budget, num_kv_blocks

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
    return num_kv_blocks(config, budget=budget, block_bytes=1000, max_model_len=length)


def test_the_budget_counts() -> None:
    assert blocks(20_999) == 20


def test_not_more_than_all_requests_need() -> None:
    assert blocks(10**9) == 1 + 8 * 4


def test_given_bytes_are_taken_in_full() -> None:
    assert blocks(10**6, kv_cache_memory_bytes=10**6) == 1000


def test_one_block_is_enough_for_a_model_without_a_given_length() -> None:
    assert blocks(2000) == 2
    with pytest.raises(StartupError, match=r"a single block needs 2000 bytes .* only 1999"):
        blocks(1999)


def test_a_given_length_must_fit() -> None:
    assert blocks(4000, max_model_len=48) == 4
    with pytest.raises(StartupError, match=r"--max-model-len 48 needs 4000 bytes .* only 3999"):
        blocks(3999, max_model_len=48)


def test_ranks_of_a_node_share_its_memory() -> None:
    cpu = torch.device("cpu")
    alone = kv_budget(EngineConfig(), cpu, 1)
    assert 0 < kv_budget(EngineConfig(), cpu, 1000) < alone
    assert kv_budget(EngineConfig(kv_cache_memory_bytes=77), cpu, 1000) == 77


def test_cache_of_a_tensor_parallel_stage() -> None:
    shape = KVShape.of(
        MODEL, range(1, 3), tp_rank=1, tp_size=2, block_size=16, dtype=torch.bfloat16
    )
    caches = shape.allocate(5, torch.device("cpu"))
    assert list(caches) == [1, 2]
    assert caches[1].k.shape == (5, 16, 2, 8)  # 3 kv heads over 2 ranks: 2 each, 1 of them padding
    assert sum(c.k.nbytes + c.v.nbytes for c in caches.values()) == 5 * shape.block_bytes
