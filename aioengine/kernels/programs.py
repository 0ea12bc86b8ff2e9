"""Calls of compiled functions, noted once and repeated without Python.

A call from Python costs as much as a small kernel, and a decode step makes some hundreds of them,
with the same arguments whenever it has as many rows: what differs from step to step lies in memory
that they read. A Program is a list of such calls; `replay` makes them all, without the interpreter
lock.

Functions are called as C has it, by address: int64 numbers, behind them at most one float64. They
give nothing, or an int64 status that is 0 unless something went wrong.
"""

import inspect
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from aioengine.kernels.clock import now
from aioengine.kernels.codegen import I64, entry, pointer

MAX_INTS: Final = 24
_CALL: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "function",  # address
            "num_ints",
            "num_floats",  # 0 or 1
            "args",  # address of as many words
        )
    ]
)
_F64: Final = ir.DoubleType()


class Op:
    """What layers call, through `Team.call`: a compiled function that programs can call, too."""

    def __init__(self, function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters.values()
        kinds = [parameter.annotation for parameter in parameters]
        self.num_floats = kinds.count(float)
        self.num_ints = len(kinds) - self.num_floats
        assert kinds == [int] * self.num_ints + [float] * self.num_floats
        self.run: Any = entry(function)

    @cached_property
    def address(self) -> int:
        """Of what C calls."""
        kinds = (types.int64,) * self.num_ints + (types.float64,) * self.num_floats
        return c_address(self.run, kinds)


def op(function: Callable[..., None]) -> Op:
    """Decorator of functions at module level."""
    return Op(function)


def c_address(function: Any, kinds: tuple[Any, ...]) -> int:
    """The address at which C calls a function of numba's, for arguments of these types."""
    function.compile(kinds)
    compiled = function.overloads[kinds]
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    return int(compiled.library.get_pointer_to_function(name))


@intrinsic
def _call(typing: Any, function: Any, num_ints: Any, num_floats: Any, args: Any) -> Any:
    """The status. One case for each list of arguments that there can be."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function, num_ints, num_floats, words = args
        end = builder.append_basic_block("end")
        unknown = builder.append_basic_block("unknown")
        switch = builder.switch(builder.add(builder.shl(num_ints, I64(1)), num_floats), unknown)
        statuses = []
        for ints in range(MAX_INTS + 1):
            for floats in (0, 1):
                block = builder.append_basic_block()
                switch.add_case(I64(2 * ints + floats), block)
                builder.position_at_end(block)
                kinds = [I64] * ints + [_F64] * floats
                operands = [
                    builder.load(
                        builder.inttoptr(builder.add(words, I64(8 * i)), kind.as_pointer())
                    )
                    for i, kind in enumerate(kinds)
                ]
                kind = ir.FunctionType(I64, kinds).as_pointer()
                statuses.append((builder.call(builder.inttoptr(function, kind), operands), block))
                builder.branch(end)
        builder.position_at_end(unknown)
        builder.unreachable()
        builder.position_at_end(end)
        status = builder.phi(I64)
        for value, block in statuses:
            status.add_incoming(value, block)
        return status

    return types.int64(*[types.int64] * 4), generate


@entry
def _replay(calls: int, num_calls: int, state: int, times: int) -> int:
    """`state`: the number of the call under way, then two words for the clock. `times`: where the
    clock's readings before the first call and after each one go, or 0."""
    table = carray(pointer(calls), num_calls, _CALL)
    position = carray(pointer(state), 1, np.int64)
    readings = carray(pointer(times), num_calls + 1, np.int64)
    if times:
        readings[0] = now(state + 8)
    for i in range(num_calls):
        position[0] = i
        call = table[i]
        status = _call(call.function, call.num_ints, call.num_floats, call.args)
        if status:
            return status
        if times:
            readings[i + 1] = now(state + 8)
    position[0] = num_calls
    return 0


class Program:
    """Calls in order. `replay` belongs to one thread at a time; any thread may read `position`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._calls: list[tuple[int, int, int]] = []
        self._words = array("q")
        self._on_failure: dict[int, Callable[[int], None]] = {}
        self._table = np.zeros(0, _CALL)
        self._state = np.zeros(3, np.int64)

    @property
    def position(self) -> int:
        """Of the call under way; `num_calls` where there is none."""
        return int(self._state[0])

    def add(
        self,
        function: int,
        ints: Sequence[int],
        floats: Sequence[float] = (),
        on_failure: Callable[[int], None] | None = None,
    ) -> None:
        """A call of the function at this address. `on_failure` gets a status that is not 0, and
        raises what it means."""
        assert len(ints) <= MAX_INTS
        assert len(floats) <= 1
        if on_failure is not None:
            self._on_failure[self.num_calls] = on_failure
        self._calls.append((function, len(ints), len(floats)))
        self.num_calls += 1
        self._words.extend(ints)
        self._words.frombytes(array("d", floats).tobytes())

    def add_compiled(
        self, function: Any, ints: Sequence[int], on_failure: Callable[[int], None]
    ) -> None:
        """The same for a function of numba's that takes int64 alone."""
        self.add(c_address(function, (types.int64,) * len(ints)), ints, (), on_failure)

    def add_op(self, op: Op, args: Sequence[Any]) -> None:
        self.add(op.address, args[: op.num_ints], args[op.num_ints :])

    def finish(self) -> None:
        """There are no more calls; `replay` may follow."""
        self._table = np.zeros(self.num_calls, _CALL)
        args = self._words.buffer_info()[0]
        for call, noted in zip(self._table, self._calls, strict=True):
            call["function"], call["num_ints"], call["num_floats"] = noted
            call["args"] = args
            args += 8 * sum(noted[1:])
        self._calls.clear()
        self._state[0] = self.num_calls

    def replay(self, times: NDArray[np.int64] | None = None) -> None:
        """All calls. `times`, of one more than there are: the clock (CLOCK_MONOTONIC in ns) before
        the first and after each. Raises what `on_failure` of a call raises, which is the last."""
        status = _replay(
            self._table.ctypes.data,
            self.num_calls,
            self._state.ctypes.data,
            0 if times is None else times.ctypes.data,
        )
        if status:
            self._on_failure[self.position](status)
