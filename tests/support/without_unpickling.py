"""`python -m aioengine.launch` in which whoever unpickles gets an error.

The one exception is numba, which keeps the kernels that it has compiled in a cache on disk: files
of this user, like Python's own compiled modules.
"""

import _pickle
import contextlib
import pickle
import runpy
import sys
from collections.abc import Callable
from typing import Any

ALLOWED = "numba.core.caching"


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def guard(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller == ALLOWED:
            return function(*args, **kwargs)
        found = f"pickle.{name} was reached by {caller}"
        sys.stdout.write(found + "\n")  # at once: print() writes a line's end apart
        sys.stdout.flush()
        raise RuntimeError(found)

    return guard


class Unpickler(_pickle.Unpickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"pickle.Unpickler was reached by {type(self)}")


for module in (pickle, _pickle):
    for name in ("load", "loads"):
        setattr(module, name, guarded(name, getattr(_pickle, name)))
    module.Unpickler = Unpickler  # type: ignore[misc]

with contextlib.suppress(RuntimeError):
    pickle.loads(b"")

runpy.run_module("aioengine.launch", run_name="__main__", alter_sys=True)
