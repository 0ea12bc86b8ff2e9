"""Machine code on disk: numba's cache, per processor and version of numba, with rules of our own.

**Stale.** numba itself takes code for stale when the file of the cached function has another date
or size, and looks at no module which that function calls into. Ours is stale when the text of that
file or of any source of this package is another.

**Found.** numba prepares its context for compiling, which takes 0.2 s, before it looks. We do not:
what is found needs nothing but the runtime's symbols.

**Not found.** One process of a host compiles a function, which takes seconds; others that need it
wait for its result. The wait is limited, as that process may be stopped.

Where no directory can be written to, everything is compiled at each start.
"""

import fcntl
import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from numba.core import caching
from numba.core.runtime import rtsys

log = logging.getLogger(__name__)

MAX_WAIT_S: Final = 60.0
_LOOK_S: Final = 0.02
"""Between two looks at a lock that another process holds."""


def cache_for(function: Callable[..., Any]) -> Any:
    """What numba's dispatchers take as theirs."""
    try:
        return _Cache(function)
    except RuntimeError:  # "no locator available": no directory that can be written to
        return caching.NullCache()


def digest_of(paths: Sequence[Path]) -> str:
    """Of files: names and contents."""
    digest = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)} ".encode() + text)
    return digest.hexdigest()


_SOURCES: Final = sorted(Path(__file__).parent.glob("*.py"))
_SOURCES_DIGEST: Final = digest_of(_SOURCES)


class _Cache(caching.FunctionCache):  # type: ignore[misc] # numba has no types
    """Loads and saves the code of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        file = Path(inspect.getfile(function))
        digest = _SOURCES_DIGEST if file in _SOURCES else digest_of([*_SOURCES, file])
        name = self._impl.filename_base
        self._cache_file = caching.IndexDataCacheFile(self._cache_path, name, digest)
        self._lock = _Lock(Path(self._cache_path, f"{name}.lock"))

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """None: the caller is to compile, and to call `save_overload` then."""
        rtsys.initialize(target_context)
        found = self._load_overload(signature, target_context)
        if found is None:
            _announce_compiling()
            self._lock.acquire()
            found = self._load_overload(signature, target_context)
            if found is not None:
                self._lock.release()
        return found

    def save_overload(self, signature: Any, result: Any) -> None:
        try:
            super().save_overload(signature, result)
        finally:
            self._lock.release()


class _Lock:
    """Held by one process at a time, until it lets go of it or ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Goes on without the lock after MAX_WAIT_S, or where files cannot be locked."""
        deadline = time.monotonic() + MAX_WAIT_S
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            while not self._is_mine(self._fd) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        except OSError as error:
            log.debug("%s: %s", self._path, error)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @staticmethod
    def _is_mine(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@cache
def _announce_compiling() -> None:
    """Once a process, as it takes seconds in which nothing else is heard of it."""
    log.info("compiling kernels for this processor; later starts find them in numba's cache")
