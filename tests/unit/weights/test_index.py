import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor

from aioengine.checkpoint import file_bytes
from aioengine.checkpoint.source import ModelSource, read_model_config, resolve_model
from aioengine.errors import StartupError
from aioengine.weights.index import WeightIndex, open_index
from tests.unit.weights.tiny_llama import (
    HEAD_DIM,
    VOCAB,
    gguf_name,
    halves_of_heads,
    packed_matrix,
    random_tensors,
    write_gguf,
)

PLAIN_KINDS = ["F32", "F16", "BF16"]
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", *PLAIN_KINDS]
DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def rounded(tensor: Tensor, kind: Kind) -> Tensor:
    """What is left of a matrix after it was stored as `kind`; blocks run along rows."""
    if tensor.dim() == 1:
        return tensor
    return torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))


def check_slices(index: WeightIndex, name: str, expected: Tensor, unit: int = 1) -> None:
    """Whole, by rows that are multiples of `unit`, and by columns that cut through blocks."""
    assert index.shape(name) == tuple(expected.shape)
    assert torch.equal(index.read(name, None, 0, 0).float(), expected)
    first, last = unit, 3 * unit
    assert torch.equal(index.read(name, 0, first, last).float(), expected[first:last])
    if expected.dim() == 2:
        for start, stop in ((0, 5), (31, 33), (100, 256)):
            found = index.read(name, 1, start, stop)
            assert torch.equal(found.float(), expected[:, start:stop])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0])
def test_gguf_gives_back_the_hugging_face_tensors(tmp_path: Path, kind: Kind) -> None:
    tensors = random_tensors()
    write_gguf(tmp_path / "tiny.gguf", tensors, kind)
    index = open_index(ModelSource(tmp_path / "tiny.gguf", "gguf"))
    assert index.names() == {*tensors, "rope_freqs.weight"}
    for name, tensor in tensors.items():
        rotary = ".q_proj." in name or ".k_proj." in name
        check_slices(index, name, rounded(tensor, kind), HEAD_DIM if rotary else 1)
    stored = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
    assert index.read(DOWN, None, 0, 0).dtype == stored
    with pytest.raises(StartupError, match=r"tiny\.gguf: tensor lm_head\.weight is missing"):
        index.read("lm_head.weight", 0, 0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_gguf(tmp_path: Path, kind: str) -> None:
    """Every slice is that of the library's dequantised whole."""
    rng = np.random.default_rng(7)
    names = [name for name, tensor in random_tensors(tied=False).items() if tensor.dim() == 2]
    shapes = {name: tuple(random_tensors(tied=False)[name].shape) for name in names}
    packed = {name: packed_matrix(Kind[kind], shapes[name], rng) for name in names}
    extra = {gguf_name(name): rows for name, rows in packed.items()}
    write_gguf(tmp_path / "tiny.gguf", {}, Kind[kind], extra=extra)
    index = open_index(ModelSource(tmp_path / "tiny.gguf", "gguf"))
    for name, rows in packed.items():
        whole = dequantize(rows, Kind[kind])
        assert np.isfinite(whole).all()
        rotary = ".q_proj." in name or ".k_proj." in name
        expected = torch.from_numpy(halves_of_heads(whole) if rotary else whole)
        check_slices(index, name, expected, HEAD_DIM if rotary else 1)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_split_gguf_by_any_part(tmp_path: Path, number: int) -> None:
    tensors = random_tensors()
    write_gguf(tmp_path / "tiny.gguf", tensors, Kind.F32, tensors_per_part=8)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == [f"tiny-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    source = resolve_model(str(tmp_path / parts[number - 1]))
    assert source.path.name == parts[0]
    config = read_model_config(source)
    assert (config.name, config.vocab_size, config.dtype) == ("tiny", VOCAB, "float32")
    index = open_index(source)
    for name, tensor in tensors.items():
        assert torch.equal(index.read(name, None, 0, 0), tensor)
    assert {index.path(name).name for name in tensors} == set(parts)


def test_split_gguf_that_cannot_be_used(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_tensors(), Kind.F32, tensors_per_part=8)
    first, second, third = sorted(tmp_path.iterdir())
    source = resolve_model(str(second))
    content = third.read_bytes()
    third.write_bytes(content[:-1])
    with pytest.raises(StartupError, match=r"tiny-00003-of-00003\.gguf: truncated: tensor"):
        open_index(source)
    third.write_bytes(second.read_bytes())
    with pytest.raises(StartupError, match=r"00003\.gguf: split\.no and split\.count are 1 and 3"):
        open_index(source)
    second.unlink()
    third.unlink()
    with pytest.raises(StartupError, match=r"00002-of-00003\.gguf, tiny-00003-of-00003.*missing"):
        open_index(source)
    with pytest.raises(StartupError, match=r"one of 3 parts, but its name"):
        open_index(ModelSource(first.rename(tmp_path / "renamed.gguf"), "gguf"))
    with pytest.raises(StartupError, match=r"00001-of-00003\.gguf: this part"):
        open_index(source)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.IQ4_XS])
def test_k_quants_of_any_bytes(tmp_path: Path, kind: Kind) -> None:
    block_bytes = GGML_QUANT_SIZES[kind][1]
    packed = np.random.default_rng(1).integers(0, 256, (VOCAB, block_bytes), np.uint8)
    write_gguf(tmp_path / "tiny.gguf", {}, kind, extra={"token_embd.weight": packed})
    index = open_index(ModelSource(tmp_path / "tiny.gguf", "gguf"))
    with np.errstate(all="ignore"):  # random scales overflow
        expected = dequantize(packed, kind)
        rows = index.read("model.embed_tokens.weight", 0, 3, 9)
        columns = index.read("model.embed_tokens.weight", 1, 17, 250)
    np.testing.assert_array_equal(rows.numpy(), expected[3:9])
    np.testing.assert_array_equal(columns.numpy(), expected[:, 17:250])


def test_gguf_refuses_to_cut_heads_in_two(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_tensors(), Kind.F32)
    index = open_index(ModelSource(tmp_path / "tiny.gguf", "gguf"))
    with pytest.raises(AssertionError, match="whole heads"):
        index.read(Q, 0, 0, HEAD_DIM + 1)


def test_safetensors_in_one_file(tmp_path: Path) -> None:
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    index = open_index(ModelSource(tmp_path, "hf"))
    assert index.names() == tensors.keys()
    for name, tensor in tensors.items():
        check_slices(index, name, tensor)
    with pytest.raises(StartupError, match=rf"{tmp_path.name}: tensor lm_head\.weight is missing"):
        index.shape("lm_head.weight")


@pytest.mark.parametrize("with_index", [True, False])
def test_safetensors_in_two_files(tmp_path: Path, with_index: bool) -> None:
    tensors = random_tensors()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, tmp_path / file)
    if with_index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        save_file(tensors, tmp_path / "consolidated.safetensors")
    index = open_index(ModelSource(tmp_path, "hf"))
    order = [places[name] for name in index.names()]
    assert order == sorted(order)
    for name, tensor in tensors.items():
        assert index.path(name).name == places[name]
        assert torch.equal(index.read(name, None, 0, 0), tensor)


def test_safetensors_that_cannot_be_used(tmp_path: Path) -> None:
    source = ModelSource(tmp_path, "hf")
    with pytest.raises(StartupError, match=r"no \.safetensors file"):
        open_index(source)
    path = tmp_path / "model.safetensors"
    save_file({NORM: torch.ones(4).to(torch.int8)}, path)
    with pytest.raises(StartupError, match=rf"{NORM} is stored as I8"):
        open_index(source).shape(NORM)
    content = path.read_bytes()
    for size in (0, 4, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(StartupError, match=r"model\.safetensors: not a readable"):
            open_index(source)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.bin"}}')
    with pytest.raises(StartupError, match=r"index\.json: gone\.bin: no such file"):
        open_index(source)
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(StartupError, match=r"model\.safetensors\.index\.json: "):
            open_index(source)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_what_cannot_be_read_after_the_header_was_names_file_and_tensor(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut, or its disk fails: an error for who reads, not a signal for the process."""
    tensors = random_tensors()
    if form == "gguf":
        path = tmp_path / "tiny.gguf"
        write_gguf(path, tensors, Kind.Q8_0)
        index = open_index(ModelSource(path, "gguf"))
    else:
        path = tmp_path / "model.safetensors"
        save_file(tensors, path)
        index = open_index(ModelSource(tmp_path, "hf"))
    first, *_, last = (name for name in index.names() if name in tensors)
    stored = gguf_name if form == "gguf" else str
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    index.read(first, None, 0, 0)
    with pytest.raises(StartupError, match=f"{path.name}: tensor {stored(last)}: truncated: it"):
        index.read(last, None, 0, 0)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StartupError, match=f"{path.name}: tensor {stored(first)}: .*output error"):
        index.read(first, None, 0, 0)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_reading_in_pieces(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_bytes, "MAX_READ_BYTES", 3001)
    tensors = random_tensors()
    if form == "gguf":
        write_gguf(tmp_path / "tiny.gguf", tensors, Kind.F32)
        index = open_index(ModelSource(tmp_path / "tiny.gguf", "gguf"))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
        index = open_index(ModelSource(tmp_path, "hf"))
    check_slices(index, DOWN, tensors[DOWN])
    check_slices(index, Q, tensors[Q], HEAD_DIM)


def test_a_type_that_the_library_cannot_unpack_is_found_without_reading(tmp_path: Path) -> None:
    block_bytes = GGML_QUANT_SIZES[Kind.Q8_1][1]
    packed = np.zeros((VOCAB, 8 * block_bytes), np.uint8)
    write_gguf(tmp_path / "tiny.gguf", {}, Kind.Q8_1, extra={"token_embd.weight": packed})
    index = open_index(ModelSource(tmp_path / "tiny.gguf", "gguf"))
    with pytest.raises(StartupError, match=r"tiny\.gguf: tensor token_embd\.weight: .*Q8_1"):
        index.shape("model.embed_tokens.weight")


def test_a_tensor_that_its_file_lacks(tmp_path: Path) -> None:
    save_file({NORM: torch.ones(4)}, tmp_path / "a.safetensors")
    places = {NORM: "a.safetensors", DOWN: "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    index = open_index(ModelSource(tmp_path, "hf"))
    with pytest.raises(StartupError, match=rf"a\.safetensors: tensor {DOWN} is missing, though"):
        index.shape(DOWN)
    with pytest.raises(StartupError, match=rf"{tmp_path.name}: tensor {Q} is missing"):
        index.shape(Q)
