"""The GGUF container: metadata values, tensor directory, bytes. Little-endian, versions 2 and 3.

`gguf.GGUFReader` makes several numpy views for every element of an array: 2.5 s for a vocabulary of
49,152 tokens with its merges. This reader walks the same header in 0.01 s, and makes strings of
these in 0.03 s when they are asked for.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from aioengine.checkpoint.file_bytes import FileBytes
from aioengine.errors import StartupError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMS: Final = 4
DEFAULT_ALIGNMENT: Final = 32

# Value types of the metadata, by their number in the file.
SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
STRING: Final = 8
ARRAY: Final = 9
U32: Final = SCALARS[4]
U64: Final = SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is row-major, slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """Bytes from the beginning of the file."""

    @property
    def block_size(self) -> int:
        """Elements of one quantisation block; 1 for plain types."""
        return int(GGML_QUANT_SIZES[self.type][0])

    @property
    def block_bytes(self) -> int:
        return int(GGML_QUANT_SIZES[self.type][1])

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block_size * self.block_bytes


@dataclass(frozen=True, slots=True)
class _PackedStrings:
    """A list of strings as it lies in the file: before each its length."""

    data: bytes
    length: int

    def unpack(self) -> list[str]:
        data, end = self.data, 0
        strings = []
        for _ in range(self.length):
            start = end + U64.size
            (size,) = U64.unpack_from(data, end)
            end = start + size
            strings.append(data[start:end].decode())
        return strings


class Fields(Mapping[str, Any]):
    """Metadata values (numbers, bools, strings, lists of them) by their keys.

    Lists of strings are unpacked when they are first asked for: a vocabulary is longer than all the
    rest, and most who open a file want none. Raises StartupError where they are not UTF-8.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _PackedStrings):
            try:
                value = self._values[key] = value.unpack()
            except UnicodeDecodeError as error:
                raise StartupError(f"{self._path}: {key}: {error}") from error
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GGUFFile:
    """A GGUF file, open as long as this object lives; its header is read at once.

    `tensors` holds the tensor directory in the file's order. Raises StartupError that names the
    file, and the tensor where one is to blame, for a file that is truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = FileBytes(path)
            mapped = np.memmap(path, dtype=np.uint8, mode="r")
            header = _Header(mapped)
            version, num_tensors, num_fields = header.preamble()
            if version not in VERSIONS:
                raise ValueError(f"version {version}; little-endian versions 2 and 3 are supported")
            self.fields = Fields(path, dict(header.field() for _ in range(num_fields)))
            entries = [header.tensor() for _ in range(num_tensors)]
            alignment = self.fields.get("general.alignment", DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 1:
                raise ValueError(f"general.alignment is {alignment!r}")
        except (OSError, ValueError, OverflowError, struct.error) as error:
            raise StartupError(f"{path}: not a readable GGUF file: {error}") from error
        start = -(-header.offset // alignment) * alignment
        self.tensors = {
            name: self._checked(GGUFTensor(name, shape, kind, start + offset), mapped.size)
            for name, shape, kind, offset in entries
        }

    def _checked(self, tensor: GGUFTensor, file_size: int) -> GGUFTensor:
        if tensor.shape[-1] % tensor.block_size:
            raise StartupError(
                f"{self.path}: tensor {tensor.name}: rows of {tensor.shape[-1]} elements are not "
                f"whole {tensor.type.name} blocks of {tensor.block_size}"
            )
        end = tensor.offset + tensor.num_rows * tensor.row_bytes
        if end > file_size:
            raise StartupError(
                f"{self.path}: truncated: tensor {tensor.name} ends at byte {end}, the file at "
                f"{file_size}"
            )
        return tensor

    def packed(self, tensor: GGUFTensor, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """Some rows of a tensor, and of these some bytes. Both slices have their two ends.

        Raises StartupError that names file and tensor when they cannot be read.
        """
        start = tensor.offset + rows.start * tensor.row_bytes
        shape = rows.stop - rows.start, tensor.row_bytes
        try:
            return self._bytes.read_columns(start, shape, columns.start, columns.stop)
        except OSError as error:
            raise StartupError(f"{self.path}: tensor {tensor.name}: {error}") from error


class _Header:
    """A cursor over the part of the file before the tensors' bytes."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data.data
        self.offset = 0

    def preamble(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of metadata fields."""
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        return self._scalar(U32), self._scalar(U64), self._scalar(U64)

    def field(self) -> tuple[str, Any]:
        key, kind = self._string(), self._scalar(U32)
        return key, self._list() if kind == ARRAY else self._value(kind)

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """Name, shape (slowest dimension first), type, offset from the start of the data part."""
        name, num_dims = self._string(), self._scalar(U32)
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar(U64) for _ in range(num_dims))[::-1]
        kind = self._scalar(U32)
        if kind not in GGML_QUANT_SIZES:
            raise ValueError(f"tensor {name} is of the unknown type {kind}")
        return name, shape, GGMLQuantizationType(kind), self._scalar(U64)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        return self._scalar(self._scalar_type(kind))

    def _list(self) -> list[Any] | _PackedStrings:
        kind, length = self._scalar(U32), self._scalar(U64)
        if kind == STRING:
            return self._strings(length)
        element = self._scalar_type(kind)
        return [value for (value,) in element.iter_unpack(self._take(element.size * length))]

    def _strings(self, length: int) -> _PackedStrings:
        data, end = self._data, self.offset
        for _ in range(length):
            (size,) = U64.unpack_from(data, end)
            end += U64.size + size
        return _PackedStrings(self._take(end - self.offset), length)

    def _scalar_type(self, kind: int) -> struct.Struct:
        if kind not in SCALARS:
            raise ValueError(f"unknown metadata type {kind} before byte {self.offset}")
        return SCALARS[kind]

    def _scalar(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._data, self.offset)
        self.offset += kind.size
        return value

    def _string(self) -> str:
        return self._take(self._scalar(U64)).decode()

    def _take(self, size: int) -> bytes:
        end = self.offset + size
        if end > len(self._data):
            raise ValueError(f"truncated: the header goes on after byte {len(self._data)}")
        taken = bytes(self._data[self.offset : end])
        self.offset = end
        return taken
