"""What stays quantised, and that it stands for what the checkpoint says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from aioengine.checkpoint.source import ModelSource
from aioengine.config import Quantization
from aioengine.layers.memory import ParameterMemory
from aioengine.layers.partition import Shard
from aioengine.layers.quantized import PackedParameter
from aioengine.layers.quantized_format import INT4, INT4_FLOAT32, INT8, Format
from aioengine.weights.formats import choose_formats
from aioengine.weights.index import WeightIndex, open_index
from aioengine.weights.loader import Wanted, load_weights
from tests.unit.weights.tiny_llama import gguf_name, packed_matrix, random_tensors, write_gguf

KEPT = {"Q8_0": INT8, "Q4_0": INT4, "Q4_1": INT4, "Q4_K": INT4_FLOAT32}
DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
V = "model.layers.1.self_attn.v_proj.weight"
EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
CPU = torch.device("cpu")


def gguf_index(path: Path, kind: Kind) -> WeightIndex:
    rng = np.random.default_rng(7)
    matrices = {name: each for name, each in random_tensors().items() if each.dim() == 2}
    packed = {
        gguf_name(name): packed_matrix(kind, (each.shape[0], each.shape[1]), rng)
        for name, each in matrices.items()
    }
    vectors = {name: each for name, each in random_tensors().items() if each.dim() == 1}
    write_gguf(path / "tiny.gguf", vectors, kind, extra=packed)
    return open_index(ModelSource(path / "tiny.gguf", "gguf"))


def float_index(path: Path) -> WeightIndex:
    save_file(random_tensors(), path / "model.safetensors")
    return open_index(ModelSource(path, "hf"))


def wanted_of(index: WeightIndex, shard: Shard | None = None) -> list[Wanted]:
    return [
        Wanted(name, name, torch.empty(index.shape(name)), shard if name == DOWN else None)
        for name in (DOWN, Q, V, EMBED, NORM)
    ]


@pytest.mark.parametrize("kind", KEPT)
def test_blocks_of_gguf_are_kept(tmp_path: Path, kind: str) -> None:
    """Whole, by rows and by columns; rows of q in the order of Hugging Face."""
    index, stored = gguf_index(tmp_path, Kind[kind]), KEPT[kind]
    for name in (DOWN, Q):
        num_outputs, num_inputs = index.shape(name)
        for dim, start, stop in [(None, 0, 0), (0, 32, 96), (1, 64, 224), (1, 32, 64)]:
            shape = [num_outputs, num_inputs]
            if dim is not None:
                shape[dim] = stop - start
            parameter = PackedParameter.empty(stored, (shape[0], shape[1]), ParameterMemory(CPU))
            parameter.fill(index.read_groups(name, dim, start, stop))
            expected = index.read(name, dim, start, stop)
            torch.testing.assert_close(parameter.dequantize(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "quantization", "dtype", "down", "embed"),
    [
        ("Q4_1", "auto", torch.bfloat16, INT4, INT4),
        ("Q4_K", "auto", torch.float32, INT4_FLOAT32, INT4_FLOAT32),
        ("Q4_K", "auto", torch.bfloat16, INT4, INT4),
        ("Q6_K", "auto", torch.bfloat16, None, None),
        ("Q6_K", "int4", torch.bfloat16, INT4, INT8),
        ("Q8_0", "none", torch.bfloat16, None, None),
        ("Q8_0", "int8", torch.bfloat16, INT8, INT8),
        ("Q8_0", "int4", torch.bfloat16, INT4, INT8),
        ("Q4_0", "int8", torch.bfloat16, INT4, INT4),
        ("F16", "auto", torch.float16, None, None),
        ("F16", "int8", torch.float16, INT8, INT8),
        ("", "auto", torch.bfloat16, None, None),
        ("", "int8", torch.bfloat16, INT8, INT8),
        ("", "int4", torch.bfloat16, INT4, INT8),
    ],
)
def test_what_a_flag_comes_to(
    tmp_path: Path,
    kind: str,
    quantization: Quantization,
    dtype: torch.dtype,
    down: Format | None,
    embed: Format | None,
) -> None:
    index = gguf_index(tmp_path, Kind[kind]) if kind else float_index(tmp_path)
    formats = choose_formats(wanted_of(index), index, quantization, dtype)
    assert formats.get(DOWN) == formats.get(Q) == down
    assert formats.get(EMBED) == formats.get(V) == embed
    assert NORM not in formats


def test_a_cut_within_groups(tmp_path: Path) -> None:
    """Stored blocks cannot be kept then; what was asked for is made of the floats."""
    index = gguf_index(tmp_path, Kind.Q4_1)
    shard = Shard(1, 100, 200, 100, 512)
    assert DOWN not in choose_formats(wanted_of(index, shard), index, "auto", torch.bfloat16)
    formats = choose_formats(wanted_of(index, shard), index, "int8", torch.bfloat16)
    assert formats[DOWN] == INT8
    parameter = PackedParameter.empty(INT8, (index.shape(DOWN)[0], 100), ParameterMemory(CPU))
    load_weights([Wanted(DOWN, DOWN, parameter, shard)], index)
    expected = index.read(DOWN, 1, 100, 200)
    assert (parameter.dequantize() - expected).abs().max() < expected.abs().max() / 127


def test_padding_is_zero(tmp_path: Path) -> None:
    index = float_index(tmp_path)
    parameter = PackedParameter.empty(INT8, (16, 256), ParameterMemory(CPU))
    load_weights([Wanted(EMBED, EMBED, parameter, Shard(0, 30, 40, 16, 40))], index)
    values = parameter.dequantize()
    torch.testing.assert_close(values[:10], index.read(EMBED, 0, 30, 40), rtol=0, atol=0.05)
    assert not values[10:].any()
