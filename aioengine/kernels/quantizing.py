"""Weights to 8 and 4 bits: blocks as quantized_tiles.py reads them, from floats. Needs numba.

Shapes: O outputs · I inputs. A lane of a vector belongs to one of a block's 16 outputs, so that its
groups of 32 inputs are searched side by side.

**Eight bits.** The largest weight of a group becomes 127 or -127.

**Four bits.** Of some scales and minima, those with the least squared error. They are found on
WALKS walks of FITS steps: from codes to the scale and minimum that fit them best, and from these to
the nearest codes. One walk begins with the smallest and the largest weight as 0 and 15, some with
fewer codes, so that what was in 4 bits before is found again, and some cut off both ends.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    BFLOAT16,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    I64,
    Code,
    element_bytes,
    fill_floats,
    inlined,
    kernel,
    load_element,
    pointer,
    store_element,
)
from aioengine.kernels.quantized_tiles import (
    GROUP,
    INT4_BLOCK_BYTES,
    INT4_WIDE_BLOCK_BYTES,
    INT8_BLOCK_BYTES,
    TILE,
)
from aioengine.kernels.team import Team

KINDS: Final = (FLOAT32, BFLOAT16, FLOAT16)
WALKS: Final = 7
FITS: Final = 4
_FEWEST: Final = 12.0
"""Walk i begins with a group's range cut into _FEWEST + i steps of the scale."""
_LARGEST_HALF: Final = 65504.0
_SCRATCH_BYTES: Final = GROUP * TILE * 4
_INT: Final = types.int64

_JOB: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "weight",  # [O, I] of `kind`, a place in KINDS
            "kind",
            "num_outputs",
            "num_inputs",
            "blocks",
            "tile_bytes",  # from a tile to the next
            "scratch",  # _SCRATCH_BYTES for each thread
        )
    ]
)


# --- one block ------------------------------------------------------------------------------------


class _Block:
    """IR of what becomes of `values`, float32 [32 inputs, 16 outputs], at this address."""

    def __init__(self, builder: Any, values: Any) -> None:
        self.code = Code(builder, TILE)
        self.builder = builder
        self.values = values

    def value(self, k: Any) -> Any:
        """Of input k, for all outputs."""
        return self.code.load(self.code.at(self.values, k, 4 * TILE))

    def over_inputs(self, sums: list[Any], body: Any) -> list[Any]:
        """`body(value, sums)` for each input."""
        return self.code.loop(I64(GROUP), sums, lambda k, sums: body(self.value(k), list(sums)))

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def half(self, x: Any) -> Any:
        """Rounded to what float16 can hold."""
        limit = self.code.fill(_LARGEST_HALF)
        x = self.larger(self.smaller(x, limit), self.builder.fneg(limit))
        kind = ir.VectorType(F16, TILE)
        return self.builder.fpext(self.builder.fptrunc(x, kind), self.code.floats)

    def inverse(self, scale: Any) -> Any:
        """0 for 0: equal weights, or too small for a scale."""
        is_some = self.builder.fcmp_ordered(">", scale, self.code.zero)
        return self.builder.select(
            is_some, self.builder.fdiv(self.code.fill(1.0), scale), self.code.zero
        )

    def nearest(self, value: Any, inverse: Any, minimum: Any, first: float, last: float) -> Any:
        """The code of a value, as float32."""
        scaled = self.builder.fmul(self.builder.fsub(value, minimum), inverse)
        # Not a number becomes the first code.
        inside = self.smaller(self.larger(scaled, self.code.fill(first)), self.code.fill(last))
        return self.code.call(f"llvm.rint.v{TILE}f32", self.code.floats, inside)

    def extremes(self) -> tuple[Any, Any]:
        """The smallest and the largest value of each output."""
        first = self.value(I64(0))
        low, high = self.over_inputs(
            [first, first],
            lambda value, ends: [self.smaller(value, ends[0]), self.larger(value, ends[1])],
        )
        return low, high

    def step(self, state: list[Any], total: Any, whole: tuple[Any, Any]) -> list[Any]:
        """Of scale and minimum, and the best error, scale and minimum so far: the next ones.

        `total` is Σ value; `whole` goes on where nothing can be fitted, as all codes are equal.
        """
        code, builder = self.code, self.builder
        scale, minimum, *best = state
        inverse = self.inverse(scale)

        def add(value: Any, sums: list[Any]) -> list[Any]:
            errors, codes, squares, products = sums
            number = self.nearest(value, inverse, minimum, 0.0, 15.0)
            error = builder.fsub(code.fma(number, scale, minimum), value)
            return [
                code.fma(error, error, errors),
                builder.fadd(codes, number),
                code.fma(number, number, squares),
                code.fma(number, value, products),
            ]

        errors, codes, squares, products = self.over_inputs([code.zero] * 4, add)
        is_better = builder.fcmp_ordered("<", errors, best[0])
        best = [
            builder.select(is_better, found, known)
            for found, known in zip((errors, scale, minimum), best, strict=True)
        ]
        count = code.fill(float(GROUP))
        spread = builder.fsub(builder.fmul(count, squares), builder.fmul(codes, codes))
        common = builder.fsub(builder.fmul(count, products), builder.fmul(codes, total))
        fitted = builder.fdiv(common, spread)
        rest = builder.fdiv(builder.fsub(total, builder.fmul(fitted, codes)), count)
        fits = builder.fcmp_ordered(">", fitted, code.zero)
        return [
            builder.select(fits, self.half(fitted), whole[0]),
            builder.select(fits, self.half(rest), whole[1]),
            *best,
        ]

    def search(self) -> tuple[Any, Any]:
        """Scale and minimum, for codes 0…15."""
        code, builder = self.code, self.builder
        low, high = self.extremes()
        (total,) = self.over_inputs([code.zero], lambda v, sums: [builder.fadd(sums[0], v)])
        distance = builder.fsub(high, low)
        whole = self.half(builder.fdiv(distance, code.fill(15.0))), self.half(low)

        def walk(i: Any, best: list[Any]) -> list[Any]:
            steps = code.splat(builder.fadd(builder.sitofp(i, F32), ir.Constant(F32, _FEWEST)))
            cut = self.larger(builder.fsub(steps, code.fill(15.0)), code.zero)
            scale = builder.fdiv(distance, steps)
            minimum = code.fma(builder.fmul(cut, code.fill(0.5)), scale, low)
            start = self.half(scale), self.half(minimum)
            return code.loop(
                I64(FITS), [*start, *best], lambda _, state: self.step(list(state), total, whole)
            )[2:]

        _, scale, minimum = code.loop(I64(WALKS), [code.fill(float("inf")), *whole], walk)
        return scale, minimum

    def store_scales(self, value: Any, address: Any, scale: Any) -> Any:
        """The address behind them."""
        self.code.store_elements(value, address, scale)
        return self.builder.add(address, I64(TILE * (4 if scale is F32 else 2)))

    def store_codes(self, address: Any, bits: int, code_of: Any) -> None:
        """`code_of(value)` are float32."""
        code, builder = self.code, self.builder

        def number(k: Any) -> Any:
            return builder.fptosi(code_of(self.value(k)), code.ints)

        def store(chunk: Any, _: list[Any]) -> list[Any]:
            word = code.fill(0)
            for byte in range(4):
                k = builder.add(builder.mul(chunk, I64(4)), I64(byte))
                value = number(k)
                if bits == 4:
                    above = number(builder.add(k, I64(GROUP // 2)))
                    value = builder.or_(value, builder.shl(above, code.fill(4)))
                value = builder.and_(value, code.fill(255))
                word = builder.or_(word, builder.shl(value, code.fill(8 * byte)))
            code.store(word, code.at(address, chunk, 4 * TILE))
            return []

        code.loop(I64(bits), [], store)


def _writer(bits: int, scale_type: Any) -> Any:
    """A function of compiled code: one block from its values."""

    @intrinsic
    def write_block(typing: Any, values: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, address = args
            block = _Block(builder, values)
            if bits == 8:
                low, high = block.extremes()
                largest = block.larger(builder.fneg(low), high)
                scale = block.half(builder.fdiv(largest, block.code.fill(127.0)))
                minimum, first, last = block.code.zero, -127.0, 127.0
                codes_at = block.store_scales(scale, address, scale_type)
            else:
                (scale, minimum), first, last = block.search(), 0.0, 15.0
                minima_at = block.store_scales(scale, address, scale_type)
                codes_at = block.store_scales(minimum, minima_at, scale_type)
            inverse = block.inverse(scale)
            block.store_codes(
                codes_at, bits, lambda value: block.nearest(value, inverse, minimum, first, last)
            )
            return context.get_dummy_value()

        return types.void(_INT, _INT), generate

    return write_block


# --- whole matrices -------------------------------------------------------------------------------


@inlined
def _read_group(
    kind: Any, weight: int, row_bytes: int, num_rows: int, count: int, values: int
) -> None:
    """`count` inputs of `num_rows` outputs, and zeros for what is missing."""
    size = element_bytes(kind)
    if num_rows < TILE or count < GROUP:
        fill_floats(values, GROUP * TILE, 0.0)
    for row in range(num_rows):
        for i in range(count):
            value = load_element(kind, weight + row * row_bytes + i * size)
            store_element(FLOAT32, value, values + (i * TILE + row) * 4)


@inlined
def _quantize(write: Any, block_bytes: int, args: int, tile: int, thread: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    values = job.scratch + thread * _SCRATCH_BYTES
    size = 4 if job.kind == 0 else 2
    row_bytes = job.num_inputs * size
    num_rows = min(TILE, job.num_outputs - tile * TILE)
    weight, block = job.weight + tile * TILE * row_bytes, job.blocks + tile * job.tile_bytes
    for first in range(0, job.num_inputs, GROUP):
        count = min(GROUP, job.num_inputs - first)
        if job.kind == 0:
            _read_group(FLOAT32, weight, row_bytes, num_rows, count, values)
        elif job.kind == 1:
            _read_group(BFLOAT16, weight, row_bytes, num_rows, count, values)
        else:
            _read_group(FLOAT16, weight, row_bytes, num_rows, count, values)
        write(values, block)
        weight += GROUP * size
        block += block_bytes


_write_int8: Final = _writer(8, F16)
_write_int4: Final = _writer(4, F16)
_write_int4_wide: Final = _writer(4, F32)


@kernel
def _to_int8(args: int, chunk: int, thread: int) -> None:
    _quantize(_write_int8, INT8_BLOCK_BYTES, args, chunk, thread)


@kernel
def _to_int4(args: int, chunk: int, thread: int) -> None:
    _quantize(_write_int4, INT4_BLOCK_BYTES, args, chunk, thread)


@kernel
def _to_int4_wide(args: int, chunk: int, thread: int) -> None:
    _quantize(_write_int4_wide, INT4_WIDE_BLOCK_BYTES, args, chunk, thread)


_KERNELS: Final = {(8, False): _to_int8, (4, False): _to_int4, (4, True): _to_int4_wide}


class Quantizer:
    """Fills blocks on a team's threads. One matrix at a time."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._scratch = np.empty(team.num_threads * _SCRATCH_BYTES, np.uint8)
        self._job = np.zeros(1, _JOB)
        self._job["scratch"] = self._scratch.ctypes.data

    def __call__(
        self,
        bits: int,
        has_float32_scales: bool,
        kind: Any,
        weight: int,
        num_outputs: int,
        num_inputs: int,
        blocks: int,
        tile_bytes: int,
    ) -> None:
        """Addresses of a weight [O, I] of one of KINDS, and of blocks in tiles `tile_bytes` apart.
        Blocks beyond the weight's stay as they are."""
        job = self._job
        job["weight"], job["kind"] = weight, KINDS.index(kind)
        job["num_outputs"], job["num_inputs"] = num_outputs, num_inputs
        job["blocks"], job["tile_bytes"] = blocks, tile_bytes
        quantize = _KERNELS[bits, has_float32_scales]
        self._team.run(quantize.address, job.ctypes.data, -(-num_outputs // TILE))
