"""Atomic words in memory that threads share, for compiled functions. Addresses are int64."""

import platform
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from aioengine.kernels.codegen import I32, I64

_RELAX: Final = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),  # yield
}.get(platform.machine(), ("llvm.donothing", ()))
"""LLVM's name for what tells this processor that we are spinning, and its arguments."""
_INT: Final = types.int64


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """What was written before the store_release that wrote this value is seen after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return _INT(_INT), generate


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(_INT, _INT), generate


@intrinsic
def exchange(typing: Any, address: Any, value: Any) -> Any:
    """Stores a value, gives the one before. Sequentially consistent: of two threads that each
    exchange a word and then load_in_order the other's, at least one sees what the other stored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "seq_cst")

    return _INT(_INT, _INT), generate


@intrinsic
def load_in_order(typing: Any, address: Any) -> Any:
    """Sequentially consistent; see `exchange`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return _INT(_INT), generate


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:
    """Adds, gives the value before; acquires and releases."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "acq_rel")

    return _INT(_INT, _INT), generate


@intrinsic
def replace(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Compare and swap: whether the word was `expected` and is now `value`; acquires, releases."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, expected, value = args
        outcome = builder.cmpxchg(_pointer(builder, address), expected, value, "acq_rel", "acquire")
        return builder.extract_value(outcome, 1)

    return types.boolean(_INT, _INT, _INT), generate


@intrinsic
def relax(typing: Any) -> Any:
    """Tells the processor that this thread is spinning."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, hints = _RELAX
        function = ir.FunctionType(ir.VoidType(), [I32] * len(hints))
        relax = cgutils.get_or_insert_function(builder.module, function, name)
        builder.call(relax, [I32(hint) for hint in hints])
        return context.get_dummy_value()

    return types.void(), generate
