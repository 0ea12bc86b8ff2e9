"""What kernels are written with: element types, pieces of LLVM IR, compiling and caching.

Kernels are functions that numba compiles. Their innermost loops are LLVM IR, emitted by numba's
intrinsics through `Code`, because vectors of fixed width, and conversions of half types inside of
them, are not numba's. Vectors are of float32 whatever the type in memory. Addresses are int64.

**Types in memory** are classes: FLOAT32, BFLOAT16, FLOAT16, PAIR. A compiled function takes one as
an argument, and numba compiles it for each; nothing is passed at run time.

**Vector width.** On the processor that numba compiles for a register holds REGISTER_LANES floats,
and there are NUM_REGISTERS of them: 16 and 32 with AVX-512, 8 and 16 with AVX, 4 and 32 on ARM
(NEON), 4 and 16 on anything else. Wider vectors are right as well (LLVM splits them), but those
that a loop keeps must fit the registers together.

**Cache.** Functions that are called from Python, or by a Team, are cached with all that they call
(see cache.py); only functions at module level can be.
"""

import platform
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from aioengine.kernels.cache import cache_for

FLOAT32: Final = np.float32
BFLOAT16: Final = np.uint16
"""The class that stands for it; numpy has none."""
FLOAT16: Final = np.float16
PAIR: Final = np.uint32
"""Of bfloat16, side by side, as dot products take them."""

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

IR_TYPES: Final = {types.float32: F32, types.uint16: I16, types.float16: F16, types.uint32: I32}
"""In memory, by numba's type. I16 stands for bfloat16, I32 for a pair."""


# --- the processor -------------------------------------------------------------------------------


def registers_of(machine: str, features: str) -> tuple[int, int]:
    """Floats in a vector register, and how many of them there are.

    `machine` as `platform` names it, `features` as LLVM lists them: "+avx,-avx512f,…".
    """
    has = set(features.split(","))
    if "+avx512f" in has:
        return 16, 32
    if "+avx" in has:
        return 8, 16
    return 4, 32 if machine == "aarch64" else 16


_FEATURES: Final = cpu_target.target_context.codegen().magic_tuple()[2]
FEATURES: Final = set(_FEATURES.split(","))
"""Of the processor, as LLVM names them: "+avx", "-avx512f", …"""
REGISTER_LANES, NUM_REGISTERS = registers_of(platform.machine(), _FEATURES)


# --- compiling -----------------------------------------------------------------------------------


_OPTIONS: Final = {"nogil": True, "error_model": "numpy"}
"""A division by zero gives infinity, not an exception, which nobody could catch."""

inlined: Final = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)
"""For what only compiled functions call: without wrappers, and cached as a part of those."""


def entry(function: Callable[..., Any]) -> Any:
    """A function that Python calls, compiled at its first call; it runs without the GIL."""
    dispatcher = njit(**_OPTIONS)(function)
    dispatcher._cache = cache_for(function)
    return dispatcher


class Kernel:
    """A function `chunk(args, chunk, thread)` that a Team calls by its address.

    `args` is the address of a record of int64, `chunk` says which part of the work is to be done,
    and `thread` (below the number of threads) may select scratch memory. Chunks are independent of
    each other, in any order and at the same time; what is computed must not depend on `thread`.
    """

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        """The machine code, loaded from the cache or compiled when first asked for."""
        return int(self._compiled.address)

    @property
    def was_cached(self) -> bool:
        return bool(self._compiled.cache_hits)

    @cached_property
    def _compiled(self) -> Any:
        signature = (types.int64,) * 3, types.void
        compiled: Any = CFunc(self._function, signature, locals={}, options=_OPTIONS)
        compiled._cache = cache_for(self._function)
        compiled.compile()
        return compiled


def kernel(function: Callable[[int, int, int], None]) -> Kernel:
    """Decorator of functions at module level."""
    return Kernel(function)


# --- pieces of generated code --------------------------------------------------------------------


class Code:
    """A builder, and what kernels say with it. Vectors are of `lanes` float32."""

    def __init__(self, builder: ir.IRBuilder, lanes: int = REGISTER_LANES) -> None:
        self.builder = builder
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.ints = ir.VectorType(I32, lanes)
        self.zero = self.fill(0.0)

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def fill(self, value: float) -> ir.Constant:
        """A constant vector: of int32 for an int, of float32 for a float."""
        kind = self.ints if isinstance(value, int) else self.floats
        return ir.Constant(kind, [value] * self.lanes)

    def splat(self, scalar: Any) -> Any:
        """A vector of one float32."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, undefined, self.fill(0))

    def at(self, base: Any, index: Any, num_bytes: int) -> Any:
        """The address of an element."""
        return self.builder.add(base, self.builder.mul(index, self.const(num_bytes)))

    def load(self, address: Any, kind: Any = None) -> Any:
        """Of any IR type; without one, a vector of float32."""
        pointer = self.builder.inttoptr(address, (kind or self.floats).as_pointer())
        return self.builder.load(pointer, align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def load_elements(self, address: Any, element: Any) -> Any:
        """A vector in memory, of F32, F16 or I16 (bfloat16), as float32."""
        stored = ir.VectorType(element, self.lanes)
        pointer = self.builder.inttoptr(address, stored.as_pointer())
        return widened(self.builder, self.builder.load(pointer, align=bytes_of(element)))

    def store_elements(self, value: Any, address: Any, element: Any) -> None:
        """The way back, rounding to nearest, ties to even."""
        narrow = narrowed(self.builder, value, element)
        pointer = self.builder.inttoptr(address, narrow.type.as_pointer())
        self.builder.store(narrow, pointer, align=bytes_of(element))

    def call(self, name: str, kind: Any, *operands: Any) -> Any:
        """A function of LLVM or the C library."""
        function_type = ir.FunctionType(kind, [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, operands)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, a, b, c)

    def max(self, a: Any, b: Any) -> Any:
        """The larger ones; of a number and a NaN, the number."""
        return self.call(f"llvm.maxnum.v{self.lanes}f32", self.floats, a, b)

    def larger(self, a: Any, b: Any) -> Any:
        """The same in one instruction of x86, if `b` is a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp2(self, x: Any) -> Any:
        """2^x, to 2.3e-7 of it, for x ≤ 127; 0 for x < -126."""
        builder = self.builder
        rounder = self.fill(_ROUNDER)
        is_zero = builder.fcmp_ordered("<", x, self.fill(-126.0))
        x = self.max(x, self.fill(-126.0))
        whole = builder.fadd(x, rounder)  # in the lowest bits, and below them x is cut off
        part = builder.fsub(x, builder.fsub(whole, rounder))
        power = self.fill(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            power = self.fma(power, part, self.fill(coefficient))
        exponent = builder.shl(builder.bitcast(whole, self.ints), self.fill(23))
        power = builder.bitcast(
            builder.add(builder.bitcast(power, self.ints), exponent), self.floats
        )
        return builder.select(is_zero, self.zero, power)

    def sum_lanes(self, vector: Any) -> Any:
        """Neighbours first, then neighbouring sums, and so on."""
        lanes = [
            self.builder.extract_element(vector, ir.Constant(I32, i)) for i in range(self.lanes)
        ]
        while len(lanes) > 1:
            lanes = [self.builder.fadd(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    def max_lanes(self, vector: Any) -> Any:
        return self.call(f"llvm.vector.reduce.fmax.v{self.lanes}f32", F32, vector)

    def loop(
        self,
        count: Any,
        sums: Sequence[Any],
        body: Callable[..., list[Any]],
        *,
        is_unrolled: bool = True,
    ) -> list[Any]:
        """`sums = body(i, sums)` for i in range(count), in registers; the final sums. Where they
        leave few registers LLVM must be told not to unroll."""
        builder = self.builder
        before = builder.block
        head, inside, after = (
            builder.append_basic_block(name) for name in ("head", "inside", "after")
        )
        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(I64)
        i.add_incoming(self.const(0), before)
        phis = [builder.phi(start.type) for start in sums]
        for phi, start in zip(phis, sums, strict=True):
            phi.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", i, count), inside, after)
        builder.position_at_end(inside)
        for phi, value in zip(phis, body(i, phis), strict=True):
            phi.add_incoming(value, builder.block)
        i.add_incoming(builder.add(i, self.const(1)), builder.block)
        back = builder.branch(head)
        if not is_unrolled:
            back.set_metadata("llvm.loop", _not_unrolled(builder.module))
        builder.position_at_end(after)
        return phis

    def when(
        self, condition: Any, values: Sequence[Any], body: Callable[[], list[Any]]
    ) -> list[Any]:
        """`values`, or what `body()` makes of them."""
        builder = self.builder
        before = builder.block
        inside, after = (builder.append_basic_block(name) for name in ("when", "after"))
        builder.cbranch(condition, inside, after)
        builder.position_at_end(inside)
        changed = body()
        inside = builder.block
        builder.branch(after)
        builder.position_at_end(after)
        phis = [builder.phi(value.type) for value in values]
        for phi, value, other in zip(phis, values, changed, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(other, inside)
        return phis

    def for_each_count(self, count: Any, most: int, emit: Callable[[int], None]) -> None:
        """`emit(n)` for the n, 1 to `most`, that `count` is at run time."""
        done = self.builder.append_basic_block("done")
        switch = self.builder.switch(count, done)
        for n in range(1, most + 1):
            block = self.builder.append_basic_block(f"count_{n}")
            switch.add_case(self.const(n), block)
            self.builder.position_at_end(block)
            emit(n)
            self.builder.branch(done)
        self.builder.position_at_end(done)


def _not_unrolled(module: Any) -> Any:
    """What LLVM wants to know of a loop: a node that begins with itself."""
    option = module.add_metadata(["llvm.loop.unroll.disable"])
    node = module.add_metadata([f"loop {len(module.metadata)}"])
    node.operands = (node, option)
    return node


def for_each(builder: Any, count: Any, body: Callable[[Code, Any], None]) -> None:
    """`body(code, i)` for elements i of range(count), none if it is negative: whole vectors first,
    with i the first of a vector, then vectors of one."""
    wide, single = Code(builder), Code(builder, 1)
    count = builder.select(builder.icmp_signed("<", count, I64(0)), I64(0), count)
    in_vectors = builder.and_(count, I64(-wide.lanes))

    def several(i: Any, sums: list[Any]) -> list[Any]:
        body(wide, builder.mul(i, I64(wide.lanes)))
        return []

    def one(i: Any, sums: list[Any]) -> list[Any]:
        body(single, builder.add(in_vectors, i))
        return []

    wide.loop(builder.udiv(in_vectors, I64(wide.lanes)), [], several)
    single.loop(builder.sub(count, in_vectors), [], one)


_EXP2: Final = (1.0, 0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530)
"""Taylor series of 2^x, right to 1.2e-7 for |x| ≤ 0.5."""
_ROUNDER: Final = 1.5 * 2.0**23
"""A float32 from here on has no bits for fractions."""


def bytes_of(element: Any) -> int:
    """Of one element of an IR type in memory."""
    return 4 if element in (F32, I32) else 2


def widened(builder: Any, stored: Any) -> Any:
    """IR of one element in memory, or a vector of them, as float32."""
    element = _element(stored.type)
    if element == F32:
        return stored
    if element == F16:
        return builder.fpext(stored, _like(stored.type, F32))
    bits = _like(stored.type, I32)
    shifted = builder.shl(builder.zext(stored, bits), _all(bits, 16))
    return builder.bitcast(shifted, _like(stored.type, F32))


def narrowed(builder: Any, value: Any, element: Any) -> Any:
    """float32, one or a vector, as it lies in memory: rounded to nearest, ties to even."""
    if element == F32:
        return value
    if element == F16:
        return builder.fptrunc(value, _like(value.type, F16))
    kind = _like(value.type, I32)
    bits = builder.bitcast(value, kind)
    odd = builder.and_(builder.lshr(bits, _all(kind, 16)), _all(kind, 1))
    rounded = builder.add(bits, builder.add(odd, _all(kind, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, _all(kind, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, _all(kind, 16)), _like(value.type, I16))


def _element(kind: Any) -> Any:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _like(kind: Any, element: Any) -> Any:
    """The type of as many elements as `kind` has."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _all(kind: Any, value: int) -> ir.Constant:
    is_vector = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [value] * kind.count if is_vector else value)


# --- in compiled functions -----------------------------------------------------------------------


@inlined
def ceil_div(count: int, size: int) -> int:
    return (count + size - 1) // size


# --- memory, in compiled functions ---------------------------------------------------------------


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """For numba.carray."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def element_bytes(typing: Any, kind: Any) -> Any:
    """Of FLOAT32, BFLOAT16, FLOAT16 or PAIR."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return I64(bytes_of(IR_TYPES[kind.dtype]))

    return types.int64(kind), generate


@intrinsic
def load_element(typing: Any, kind: Any, address: Any) -> Any:
    """One element as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[1], IR_TYPES[kind.dtype].as_pointer())
        return widened(builder, builder.load(pointer))

    return types.float32(kind, types.int64), generate


@intrinsic
def store_element(typing: Any, kind: Any, value: Any, address: Any) -> Any:
    """A float32 as one element, rounded to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = narrowed(builder, args[1], IR_TYPES[kind.dtype])
        builder.store(narrow, builder.inttoptr(args[2], narrow.type.as_pointer()))
        return context.get_dummy_value()

    return types.void(kind, types.float32, types.int64), generate


@intrinsic
def fill_floats(typing: Any, address: Any, count: Any, value: Any) -> Any:
    """`count` float32 (none if negative) of one value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, count, value = args

        def store(code: Code, i: Any) -> None:
            code.store(code.splat(value), code.at(address, i, 4))

        for_each(builder, count, store)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def copy_element(typing: Any, kind: Any, source: Any, target: Any) -> Any:
    """One element, as it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = IR_TYPES[kind.dtype].as_pointer()
        value = builder.load(builder.inttoptr(args[1], pointer))
        builder.store(value, builder.inttoptr(args[2], pointer))
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), generate
