"""Ways to break a copy of the stories260k directory. Each gives what a launch must say about it."""

import json
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

UP: Final = "model.layers.3.mlp.up_proj.weight"
INDEX: Final = "model.safetensors.index.json"


def cut_header(model: Path) -> str:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    return f"{path}: not a readable safetensors file"


def cut_data(model: Path) -> str:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path}: not a readable safetensors file"


def other_shape(model: Path) -> str:
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors[UP] = tensors[UP][:-1].contiguous()
    save_file(tensors, path)
    return f"{path}: tensor {UP}: expected shape [172, 64], found [171, 64]"


def more_rows(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 511}))
    path, name = model / "model.safetensors", "model.embed_tokens.weight"
    return f"{path}: tensor {name}: expected shape [511, 64], found [512, 64]"


def more_layers(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    return f"{model}: 1000000000 layers, but only"


def missing_tensor(model: Path) -> str:
    path = model / "model.safetensors"
    tensors = load_file(path)
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.name)}))
    del tensors[UP]
    save_file(tensors, path)
    return f"{path}: tensor {UP} is missing, though {INDEX} puts it there"


def broken_index(model: Path) -> str:
    (model / INDEX).write_text('{"weight_map": {"a": "model-000')
    return f"{model / INDEX}: not valid JSON"


def missing_file(model: Path) -> str:
    (model / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    return f"{model / INDEX}: model-00001-of-00002.safetensors: no such file"


DAMAGES: Final = (
    cut_header,
    cut_data,
    other_shape,
    more_rows,
    more_layers,
    missing_tensor,
    broken_index,
    missing_file,
)
