"""Notes what a step calls on CPU, so that it can be repeated without Python.

The step is computed as always. Compiled functions are noted as they are called; memory for results
comes from an Arena, where it stays in its place. What torch computes cannot be noted: any operation
but an allocation or a view is a refusal, and the capture is of no use.
"""

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aioengine.activity import Activity
from aioengine.dist.groups import GroupCoordinator
from aioengine.layers.team import Op, Program, Team

ARENA_BYTES: Final = 1 << 28
"""Of addresses: memory comes when it is first written."""
_ALIGNMENT: Final = 128
_ALLOCATIONS: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
    }
)


class Arena:
    """Memory for the results of captured steps. One runs at a time, and none keeps anything, so all
    have the same memory: it grows to what the largest needs."""

    def __init__(self) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, ARENA_BYTES, mmap.MAP_PRIVATE), np.uint8)


class Capture:
    """One step, while it is entered."""

    def __init__(self, arena: Arena, team: Team, tp: GroupCoordinator, activity: Activity) -> None:
        self.program: Program = team.new_program()
        self.operations: list[str | None] = []
        """By call: which collective it is."""
        self.refusal = ""
        """Why it cannot be repeated."""
        self._team = team
        self._tp = tp
        self._activity = activity
        self._bytes = arena.bytes
        self._num_bytes = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Places of results that nobody has any more, by their size. Of each size the latest is
        taken first: it is in the processor's cache."""
        self._guard = _Guard(self)

    def __enter__(self) -> Self:
        self._team.capture = self
        self._tp.set_capture(self)
        self._guard.__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)  # type: ignore[no-untyped-call]
        self._tp.set_capture(None)
        self._team.capture = None
        self.program.finish()

    def spoil(self) -> None:
        """Makes NaN of all results: what no noted call computes must not look like anything."""
        self._bytes[: self._num_bytes] = 0xFF

    # --- what those who are captured call

    def note(self, op: Op, *args: float) -> None:
        self.program.add_op(op, args)
        self.operations.append(None)

    def note_call(
        self, function: Any, args: Sequence[int], on_failure: Callable[[int], None]
    ) -> None:
        self.program.add_compiled(function, args, on_failure)
        self.operations.append(self._activity.operation)

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Its place is used again when the last tensor that shares it is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        free = self._free[size]
        if free:
            place = free.pop()
        elif self._num_bytes + size <= len(self._bytes):
            place, self._num_bytes = self._num_bytes, self._num_bytes + size
        else:
            self.refuse(f"results take more than {len(self._bytes)} B")
            return torch.empty(shape, dtype=dtype)
        piece = self._bytes[place : place + size]
        weakref.finalize(piece, free.append, place).atexit = False
        return torch.from_numpy(piece)[:num_bytes].view(dtype).view(*shape)


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes a second, only to tell it to look away."""
        return False

    def __init__(self, capture: Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        capture = self._capture
        num_calls = capture.program.num_calls
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS and result.is_contiguous():
            return capture.empty(result.shape, result.dtype)
        is_noted = func.namespace == "aioengine" and capture.program.num_calls > num_calls
        if not is_noted and not _is_view(func, args, result):
            capture.refuse(f"torch computes {func}")
        return result


def _is_view(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether all that comes out is memory of what went in, and nothing was written."""
    if not func.is_view:
        return False
    results = [result] if isinstance(result, Tensor) else result
    return {_memory(each) for each in results} <= {_memory(args[0])}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
