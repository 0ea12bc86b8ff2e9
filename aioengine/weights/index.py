"""WeightIndex: published tensor names to tensors on disk, read whole or in slices."""

from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aioengine.checkpoint.hub import INDEX_FILE, SINGLE_FILE
from aioengine.checkpoint.json_object import read_json_object
from aioengine.checkpoint.source import ModelSource
from aioengine.errors import StartupError
from aioengine.weights.gguf_index import GGUFIndex

PLAIN_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class WeightIndex(Protocol):
    """The tensors of one checkpoint under their Hugging Face names.

    Files stay open as long as the index lives. Every method that takes a name raises StartupError
    naming tensor and file when there is no such tensor, or when its bytes cannot be read.
    """

    def names(self) -> KeysView[str]:
        """In the order of the files, so that reading in this order is sequential."""
        ...

    def path(self, name: str) -> Path:
        """The file that holds the tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        """A tensor of the caller's own: rows start..stop of dimension `dim`; all when dim is None.

        Slices are not empty, and those of q and k are whole heads. The dtype is the stored one, or
        float32 where the stored type is quantised.
        """
        ...


def open_index(source: ModelSource) -> WeightIndex:
    """Raises StartupError for files that are missing, truncated or malformed."""
    if source.kind == "gguf":
        return GGUFIndex(source.path)
    listed = _listed_places(source.path / INDEX_FILE)
    files = sorted(set(listed.values())) if listed else _unlisted_files(source.path)
    return SafetensorsIndex(source.path, files, listed)


class SafetensorsIndex:
    """A WeightIndex over one or several .safetensors files of a directory.

    `listed` says where the directory's index file, if it has one, puts each tensor.
    """

    def __init__(self, directory: Path, files: list[Path], listed: Mapping[str, Path]) -> None:
        self._directory = directory
        self._listed = listed
        self._files = {path: _open(path) for path in files}
        self._paths: dict[str, Path] = {}
        for path, file in self._files.items():
            for name in file.offset_keys():
                if name in self._paths:
                    raise StartupError(f"{path}: tensor {name} is also in {self._paths[name]}")
                self._paths[name] = path

    def names(self) -> KeysView[str]:
        return self._paths.keys()

    def path(self, name: str) -> Path:
        if name in self._paths:
            return self._paths[name]
        if name in self._listed:
            raise StartupError(
                f"{self._listed[name]}: tensor {name} is missing, though {INDEX_FILE} puts it there"
            )
        raise StartupError(f"{self._directory}: tensor {name} is missing")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self.path(name)].get_slice(name).get_shape())

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        assert dim in (None, 0, 1)
        path = self.path(name)
        try:
            if dim is None:
                tensor: Tensor = self._files[path].get_tensor(name)
            elif dim == 0:
                tensor = self._files[path].get_slice(name)[start:stop]
            else:
                tensor = self._files[path].get_slice(name)[:, start:stop]
        except SafetensorError as error:
            raise StartupError(f"{path}: tensor {name}: {error}") from error
        if tensor.dtype not in PLAIN_DTYPES:
            raise StartupError(
                f"{path}: tensor {name} is stored as {tensor.dtype}; quantised checkpoints are "
                "supported as GGUF only"
            )
        return tensor


def _open(path: Path) -> Any:
    """A safe_open; Any, because its stub leaves the methods unannotated."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{path}: not a readable safetensors file: {error}") from error


def _listed_places(index_path: Path) -> dict[str, Path]:
    """The file of each tensor by the directory's index file; empty without one."""
    if not index_path.is_file():
        return {}
    try:
        places = read_json_object(index_path).get("weight_map")
    except ValueError as error:
        raise StartupError(str(error)) from error
    if not isinstance(places, dict) or not places:
        raise StartupError(f"{index_path}: weight_map is missing")
    files = {str(name) for name in places.values()}
    missing = sorted(name for name in files if not (index_path.parent / name).is_file())
    if missing:
        raise StartupError(f"{index_path}: {', '.join(missing)}: no such file in the directory")
    return {name: index_path.parent / str(file) for name, file in places.items()}


def _unlisted_files(directory: Path) -> list[Path]:
    """model.safetensors, else every .safetensors file."""
    single = directory / SINGLE_FILE
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise StartupError(f"{directory}: no .safetensors file")
    return files
