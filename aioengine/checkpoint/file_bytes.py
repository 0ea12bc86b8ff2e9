"""FileBytes: parts of a file, read when asked for."""

import os
import weakref
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_READ_BYTES: Final = 2**26
"""Asked for in one call; also the most that is held beside the columns that are kept."""


class FileBytes:
    """Open as long as this object lives.

    Not mapped: where a mapped page cannot be read (the file was cut meanwhile, the disk fails) the
    process gets SIGBUS, and nobody learns which tensor it was. Here it is an OSError.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def read(self, start: int, size: int) -> NDArray[np.uint8]:
        """`size` bytes from `start` on. Raises OSError, also for a file that ends before."""
        data = np.empty(size, np.uint8)
        view = data.data
        done = 0
        while done < size:
            got = os.preadv(self._fd, [view[done : done + MAX_READ_BYTES]], start + done)
            if not got:
                raise OSError(f"truncated: it ends at byte {start + done}")
            done += got
        return data

    def read_columns(
        self, start: int, shape: tuple[int, int], first: int, last: int
    ) -> NDArray[np.uint8]:
        """Columns `first` to `last` of a matrix of bytes that lies row by row from `start` on."""
        num_rows, row_bytes = shape
        if (first, last) == (0, row_bytes):
            return self.read(start, num_rows * row_bytes).reshape(shape)
        columns = np.empty((num_rows, last - first), np.uint8)
        rows_at_once = max(1, MAX_READ_BYTES // row_bytes)
        for row in range(0, num_rows, rows_at_once):
            end = min(num_rows, row + rows_at_once)
            piece = self.read(start + row * row_bytes, (end - row) * row_bytes)
            columns[row:end] = piece.reshape(-1, row_bytes)[:, first:last]
        return columns
