"""WeightIndex: published tensor names to tensors on disk, read whole or in slices."""

import json
import math
from collections.abc import KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aioengine.checkpoint.file_bytes import FileBytes
from aioengine.checkpoint.hub import INDEX_FILE, SINGLE_FILE
from aioengine.checkpoint.json_object import read_json_object
from aioengine.checkpoint.source import ModelSource
from aioengine.errors import StartupError
from aioengine.layers.quantized_format import Format, Groups
from aioengine.weights.gguf_index import GGUFIndex

PLAIN_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
"""By the name that a safetensors header gives them."""


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

    def shape(self, name: str) -> tuple[int, ...]:
        """StartupError, too, when the tensor is stored as a type that cannot be read."""
        ...

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        """A tensor of the caller's own: rows start..stop of dimension `dim`; all when dim is None.

        Slices are not empty, and those of q and k are whole heads. The dtype is the stored one, or
        float32 where the stored type is quantised.
        """
        ...

    def formats(self, name: str) -> tuple[Format, ...]:
        """In which its own bits can be kept: the first one exactly, a second one takes less
        memory."""
        ...

    def read_groups(self, name: str, dim: int | None, start: int, stop: int) -> Groups:
        """As `read`, of a matrix that has formats; slices of dimension 1 are whole groups."""
        ...


def open_index(source: ModelSource) -> WeightIndex:
    """Raises StartupError for files that are missing, truncated or malformed."""
    if source.kind == "gguf":
        return GGUFIndex(source.path)
    listed = _listed_places(source.path / INDEX_FILE)
    files = sorted(set(listed.values())) if listed else _unlisted_files(source.path)
    return SafetensorsIndex(source.path, files, listed)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where one tensor lies in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte of the file."""


class SafetensorsIndex:
    """A WeightIndex over one or several .safetensors files of a directory.

    `listed` says where the directory's index file, if it has one, puts each tensor.
    """

    def __init__(self, directory: Path, files: list[Path], listed: Mapping[str, Path]) -> None:
        self._directory = directory
        self._listed = listed
        self._files: dict[Path, FileBytes] = {}
        self._tensors: dict[str, _Stored] = {}
        self._paths: dict[str, Path] = {}
        for path in files:
            self._files[path], tensors = _open(path)
            for name, stored in tensors.items():
                if name in self._paths:
                    raise StartupError(f"{path}: tensor {name} is also in {self._paths[name]}")
                self._paths[name] = path
                self._tensors[name] = stored

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
        path = self.path(name)
        stored = self._tensors[name]
        if stored.dtype not in PLAIN_DTYPES:
            raise StartupError(
                f"{path}: tensor {name} is stored as {stored.dtype}; quantised checkpoints are "
                "supported as GGUF only"
            )
        return stored.shape

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        assert dim in (None, 0, 1)
        shape = list(self.shape(name))
        stored, path = self._tensors[name], self._paths[name]
        dtype = PLAIN_DTYPES[stored.dtype]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        rows, columns = slice(0, shape[0]) if shape else slice(0, 1), slice(0, row_bytes)
        if dim == 0:
            rows = slice(start, stop)
        elif dim == 1:
            column_bytes = row_bytes // shape[1]
            columns = slice(start * column_bytes, stop * column_bytes)
        if dim is not None:
            shape[dim] = stop - start
        try:
            packed = self._files[path].read_columns(
                stored.start + rows.start * row_bytes,
                (rows.stop - rows.start, row_bytes),
                columns.start,
                columns.stop,
            )
        except OSError as error:
            raise StartupError(f"{path}: tensor {name}: {error}") from error
        return torch.from_numpy(packed).view(dtype).reshape(shape)

    def formats(self, name: str) -> tuple[Format, ...]:
        return ()

    def read_groups(self, name: str, dim: int | None, start: int, stop: int) -> Groups:
        raise AssertionError("no tensor of safetensors has a format")


def _open(path: Path) -> tuple[FileBytes, dict[str, _Stored]]:
    """The file, and its tensors in the order in which they lie."""
    try:
        with safe_open(path, framework="np"):  # checks the header and the file's size
            file = FileBytes(path)
        header_bytes = int.from_bytes(file.read(0, 8).tobytes(), "little")
        header = json.loads(file.read(8, header_bytes).tobytes())
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{path}: not a readable safetensors file: {error}") from error
    header.pop("__metadata__", None)
    data = 8 + header_bytes
    tensors = {
        name: _Stored(entry["dtype"], tuple(entry["shape"]), data + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return file, dict(sorted(tensors.items(), key=lambda each: each[1].start))


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
