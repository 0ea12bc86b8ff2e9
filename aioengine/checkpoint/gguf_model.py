"""GGUFModel: one model in one GGUF file, or in the parts that llama-gguf-split cuts one into."""

import re
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aioengine.checkpoint.gguf_file import GGUFFile, GGUFTensor
from aioengine.errors import StartupError

PART_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_path(path: Path, number: int) -> Path:
    """The sibling of a part that has this number (from 1); any other file stands for itself."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return path
    return path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf")


def model_name(path: Path) -> str:
    """The file's name without its ending and without the number of a part."""
    match = PART_NAME.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


class GGUFModel:
    """Metadata and tensors of a whole model. `path` is its only file, or its first part.

    Any part may be given. Raises StartupError that names the file for what is missing, truncated or
    malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = part_path(path, 1)
        if not self.path.is_file():
            raise StartupError(f"{self.path}: this part of the model is missing")
        first = GGUFFile(self.path)
        self.fields = first.fields
        self.tensors: dict[str, GGUFTensor] = {}
        self._files: dict[str, GGUFFile] = {}
        for file in [first, *_other_parts(first)]:
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise StartupError(
                        f"{file.path}: tensor {name} is also in {self._files[name].path}"
                    )
                self.tensors[name] = tensor
                self._files[name] = file
        num_tensors = self.fields.get("split.tensors.count", len(self.tensors))
        if num_tensors != len(self.tensors):
            raise StartupError(
                f"{self.path}: its parts hold {len(self.tensors)} tensors, split.tensors.count is "
                f"{num_tensors}"
            )

    def tensor(self, name: str) -> GGUFTensor:
        """Raises StartupError when no part has such a tensor."""
        if name not in self.tensors:
            raise StartupError(f"{self.path}: tensor {name} is missing")
        return self.tensors[name]

    def file(self, name: str) -> Path:
        """The part that holds an existing tensor."""
        return self._files[name].path

    def packed(self, tensor: GGUFTensor, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """As `GGUFFile.packed`."""
        return self._files[tensor.name].packed(tensor, rows, columns)


def _other_parts(first: GGUFFile) -> list[GGUFFile]:
    """Parts 2 and on, after checking that all are there and belong together."""
    count = first.fields.get("split.count", 0)
    if count in (0, 1):
        return []
    match = PART_NAME.fullmatch(first.path.name)
    if match is None or int(match["count"]) != count:
        raise StartupError(
            f"{first.path}: one of {count} parts, but its name does not end in "
            f"-00001-of-{count:05d}.gguf, from which the others' names follow"
        )
    paths = [part_path(first.path, number) for number in range(2, count + 1)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise StartupError(f"{first.path}: {', '.join(missing)}: missing beside this first part")
    files = [first, *map(GGUFFile, paths)]
    for place, file in enumerate(files):
        found = (file.fields.get("split.no"), file.fields.get("split.count"))
        if found != (place, count):
            raise StartupError(
                f"{file.path}: split.no and split.count are {found[0]} and {found[1]}, not "
                f"{place} and {count}"
            )
    return files[1:]
