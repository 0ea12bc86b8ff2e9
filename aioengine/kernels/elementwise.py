"""What layers do between products, each in one pass: norms, gates, rotation.

Arithmetic is float32 whatever the type in memory, and each result is rounded once. Where a row's
length is no multiple of a vector's the rest goes through the same code, with vectors of one.

Shapes: T rows · D features · M heads · H head_dim · F = H / 2.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    BFLOAT16,
    F32,
    FLOAT16,
    FLOAT32,
    IR_TYPES,
    Code,
    bytes_of,
    ceil_div,
    copy_element,
    element_bytes,
    inlined,
    kernel,
    pointer,
)
from aioengine.kernels.programs import op
from aioengine.kernels.team import Team, run_job

CHUNK_ELEMENTS: Final = 16384
_LOG2_E: Final = 1.4426950408889634
_MAX_EXPONENT: Final = 126.0
"""Of 2 in float32, with room for what comes after."""

_JOB: Final = np.dtype(
    [
        *((name, np.int64) for name in ("out", "out_bytes", "x", "x_bytes")),  # bytes of a row
        *((name, np.int64) for name in ("y", "y_bytes", "sum", "sum_bytes")),
        ("weight", np.int64),
        ("num_rows", np.int64),
        ("num_features", np.int64),
        ("num_heads", np.int64),
        ("rows_per_chunk", np.int64),
        ("eps", np.float64),
    ]
)
_INT: Final = types.int64


# --- pieces of generated code --------------------------------------------------------------------


def _for_vectors(builder: Any, count: Any, sums: list[Any], body: Callable[..., list[Any]]) -> Any:
    """`sums = body(code, i, sums)` for the vectors that begin at element i; `sums` and the result
    are single numbers."""
    wide, single = Code(builder), Code(builder, 1)
    whole = builder.sdiv(count, wide.const(wide.lanes))

    def wide_body(i: Any, totals: list[Any]) -> list[Any]:
        return body(wide, builder.mul(i, wide.const(wide.lanes)), totals)

    totals = wide.loop(whole, [wide.zero for _ in sums], wide_body)
    done = builder.mul(whole, wide.const(wide.lanes))
    starts = [
        single.splat(builder.fadd(a, wide.sum_lanes(b))) for a, b in zip(sums, totals, strict=True)
    ]

    def single_body(i: Any, totals: list[Any]) -> list[Any]:
        return body(single, builder.add(done, i), totals)

    rest = single.loop(builder.sub(count, done), starts, single_body)
    return [single.sum_lanes(total) for total in rest]


@intrinsic
def _sum_squares(typing: Any, kind: Any, x: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, count = args
        element = IR_TYPES[kind.dtype]

        def body(code: Code, i: Any, totals: list[Any]) -> list[Any]:
            value = code.load_elements(code.at(x, i, bytes_of(element)), element)
            return [code.fma(value, value, totals[0])]

        return _for_vectors(builder, count, [F32(0.0)], body)[0]

    return types.float32(kind, _INT, _INT), generate


@intrinsic
def _add(typing: Any, kind: Any, x: Any, y: Any, out: Any, count: Any) -> Any:
    """Writes x + y."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, y, out, count = args
        element = IR_TYPES[kind.dtype]
        size = bytes_of(element)

        def body(code: Code, i: Any, _: list[Any]) -> list[Any]:
            a, b = (code.load_elements(code.at(at, i, size), element) for at in (x, y))
            code.store_elements(builder.fadd(a, b), code.at(out, i, size), element)
            return []

        _for_vectors(builder, count, [], body)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 4), generate


@intrinsic
def _scale(typing: Any, kind: Any, x: Any, factor: Any, weight: Any, out: Any, count: Any) -> Any:
    """Writes x · factor · weight."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, factor, weight, out, count = args
        element = IR_TYPES[kind.dtype]
        size = bytes_of(element)

        def body(code: Code, i: Any, _: list[Any]) -> list[Any]:
            a, b = (code.load_elements(code.at(at, i, size), element) for at in (x, weight))
            scaled = builder.fmul(builder.fmul(a, code.splat(factor)), b)
            code.store_elements(scaled, code.at(out, i, size), element)
            return []

        _for_vectors(builder, count, [], body)
        return context.get_dummy_value()

    return types.void(kind, _INT, types.float32, *[_INT] * 3), generate


@intrinsic
def _gate(typing: Any, kind: Any, gate: Any, up: Any, out: Any, count: Any) -> Any:
    """Writes gate / (1 + e^-gate) · up."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, gate, up, out, count = args
        element = IR_TYPES[kind.dtype]
        size = bytes_of(element)

        def body(code: Code, i: Any, _: list[Any]) -> list[Any]:
            a, b = (code.load_elements(code.at(at, i, size), element) for at in (gate, up))
            exponent = builder.fmul(a, code.fill(-_LOG2_E))
            limit = code.fill(_MAX_EXPONENT)
            is_small = builder.fcmp_ordered("<", exponent, limit)
            power = code.exp2(builder.select(is_small, exponent, limit))
            silu = builder.fdiv(a, builder.fadd(code.fill(1.0), power))
            code.store_elements(builder.fmul(silu, b), code.at(out, i, size), element)
            return []

        _for_vectors(builder, count, [], body)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 4), generate


@intrinsic
def _turn(typing: Any, kind: Any, first: Any, second: Any, cos: Any, sin: Any, count: Any) -> Any:
    """Turns pairs (first[i], second[i]) by their angles, in place."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, *addresses, count = args
        element = IR_TYPES[kind.dtype]

        def body(code: Code, i: Any, _: list[Any]) -> list[Any]:
            places = [code.at(address, i, bytes_of(element)) for address in addresses]
            a, b, cos, sin = (code.load_elements(place, element) for place in places)
            turned = (
                builder.fsub(builder.fmul(a, cos), builder.fmul(b, sin)),
                builder.fadd(builder.fmul(b, cos), builder.fmul(a, sin)),
            )
            for value, place in zip(turned, places[:2], strict=True):
                code.store_elements(value, place, element)
            return []

        _for_vectors(builder, count, [], body)
        return context.get_dummy_value()

    return types.void(kind, *[_INT] * 5), generate


# --- kernels -------------------------------------------------------------------------------------


@inlined
def _norm_rows(kind: Any, args: int, chunk: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    first = chunk * job.rows_per_chunk
    for row in range(first, min(first + job.rows_per_chunk, job.num_rows)):
        x = job.x + row * job.x_bytes
        if job.y:
            total = job.sum + row * job.sum_bytes
            _add(kind, x, job.y + row * job.y_bytes, total, job.num_features)
            x = total
        mean = _sum_squares(kind, x, job.num_features) / np.float32(job.num_features)
        factor = np.float32(1.0) / np.sqrt(mean + np.float32(job.eps))
        _scale(kind, x, factor, job.weight, job.out + row * job.out_bytes, job.num_features)


@inlined
def _add_rows(kind: Any, args: int, chunk: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    first = chunk * job.rows_per_chunk
    for row in range(first, min(first + job.rows_per_chunk, job.num_rows)):
        x, y = job.x + row * job.x_bytes, job.y + row * job.y_bytes
        _add(kind, x, y, job.out + row * job.out_bytes, job.num_features)


@inlined
def _copy_rows(kind: Any, args: int, chunk: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    size = element_bytes(kind)
    first = chunk * job.rows_per_chunk
    for row in range(first, min(first + job.rows_per_chunk, job.num_rows)):
        x, out = job.x + row * job.x_bytes, job.out + row * job.out_bytes
        for i in range(job.num_features):
            copy_element(kind, x + i * size, out + i * size)


@inlined
def _gate_rows(kind: Any, args: int, chunk: int) -> None:
    job = carray(pointer(args), 1, _JOB)[0]
    first = chunk * job.rows_per_chunk
    for row in range(first, min(first + job.rows_per_chunk, job.num_rows)):
        gate = job.x + row * job.x_bytes
        up = gate + job.num_features * element_bytes(kind)
        _gate(kind, gate, up, job.out + row * job.out_bytes, job.num_features)


@inlined
def _rotate_rows(kind: Any, args: int, chunk: int) -> None:
    """`y` holds cosines, `sum` sines; `num_features` is F."""
    job = carray(pointer(args), 1, _JOB)[0]
    half_bytes = job.num_features * element_bytes(kind)
    first = chunk * job.rows_per_chunk
    for row in range(first, min(first + job.rows_per_chunk, job.num_rows)):
        cos, sin = job.y + row * job.y_bytes, job.sum + row * job.sum_bytes
        for head in range(job.num_heads):
            x = job.x + row * job.x_bytes + head * 2 * half_bytes
            _turn(kind, x, x + half_bytes, cos, sin, job.num_features)


@kernel
def _norm_float32(args: int, chunk: int, thread: int) -> None:
    _norm_rows(FLOAT32, args, chunk)


@kernel
def _norm_bfloat16(args: int, chunk: int, thread: int) -> None:
    _norm_rows(BFLOAT16, args, chunk)


@kernel
def _norm_float16(args: int, chunk: int, thread: int) -> None:
    _norm_rows(FLOAT16, args, chunk)


@kernel
def _add_float32(args: int, chunk: int, thread: int) -> None:
    _add_rows(FLOAT32, args, chunk)


@kernel
def _copy_4_bytes(args: int, chunk: int, thread: int) -> None:
    _copy_rows(FLOAT32, args, chunk)


@kernel
def _copy_2_bytes(args: int, chunk: int, thread: int) -> None:
    _copy_rows(BFLOAT16, args, chunk)


@kernel
def _gate_float32(args: int, chunk: int, thread: int) -> None:
    _gate_rows(FLOAT32, args, chunk)


@kernel
def _add_bfloat16(args: int, chunk: int, thread: int) -> None:
    _add_rows(BFLOAT16, args, chunk)


@kernel
def _gate_bfloat16(args: int, chunk: int, thread: int) -> None:
    _gate_rows(BFLOAT16, args, chunk)


@kernel
def _add_float16(args: int, chunk: int, thread: int) -> None:
    _add_rows(FLOAT16, args, chunk)


@kernel
def _gate_float16(args: int, chunk: int, thread: int) -> None:
    _gate_rows(FLOAT16, args, chunk)


@kernel
def _rotate_float32(args: int, chunk: int, thread: int) -> None:
    _rotate_rows(FLOAT32, args, chunk)


@kernel
def _rotate_bfloat16(args: int, chunk: int, thread: int) -> None:
    _rotate_rows(BFLOAT16, args, chunk)


@kernel
def _rotate_float16(args: int, chunk: int, thread: int) -> None:
    _rotate_rows(FLOAT16, args, chunk)


_KERNELS: Final[dict[Any, Any]] = {
    FLOAT32: (_norm_float32, _add_float32, _copy_4_bytes, _gate_float32, _rotate_float32),
    BFLOAT16: (_norm_bfloat16, _add_bfloat16, _copy_2_bytes, _gate_bfloat16, _rotate_bfloat16),
    FLOAT16: (_norm_float16, _add_float16, _copy_2_bytes, _gate_float16, _rotate_float16),
}


@op
def _run(
    control: int,
    num_helpers: int,
    kernel_address: int,
    args: int,
    out: int,
    out_bytes: int,
    x: int,
    x_bytes: int,
    y: int,
    y_bytes: int,
    total: int,
    sum_bytes: int,
    weight: int,
    num_rows: int,
    num_features: int,
    num_heads: int,
    eps: float,
) -> None:
    """Fills the record, and does what it says."""
    job = carray(pointer(args), 1, _JOB)[0]
    job.out, job.out_bytes = out, out_bytes
    job.x, job.x_bytes = x, x_bytes
    job.y, job.y_bytes = y, y_bytes
    job.sum, job.sum_bytes = total, sum_bytes
    job.weight = weight
    job.num_rows, job.num_features, job.num_heads = num_rows, num_features, num_heads
    job.eps = eps
    job.rows_per_chunk = max(1, CHUNK_ELEMENTS // (num_features * num_heads))
    num_chunks = ceil_div(num_rows, job.rows_per_chunk)
    run_job(control, num_helpers, kernel_address, args, num_chunks)


class Elementwise:
    """These kernels for one type, on a team's threads. One call at a time.

    Arguments are addresses of the tensors that shapes name; `*_bytes` is from row to row, and where
    it is missing rows are adjacent.
    """

    def __init__(self, team: Team, kind: Any) -> None:
        self._team = team  # lives as long as its handle is used
        self._size = np.dtype(kind).itemsize
        self._job = np.zeros(1, _JOB)
        self._norm, self._add, self._copy, self._gate, self._rotate = (
            (*team.handle, kernel.address, self._job.ctypes.data) for kernel in _KERNELS[kind]
        )

    def rms_norm(
        self,
        out: int,
        x: int,
        y: int,
        total: int,
        weight: int,
        num_rows: int,
        num_features: int,
        eps: float,
    ) -> None:
        """[T, D]: `total` = x + y, rounded to the type, and `out` its norm. Without y (0), of x."""
        row = num_features * self._size
        self._team.call(
            _run,
            *self._norm,
            out,
            row,
            x,
            row,
            y,
            row,
            total,
            row,
            weight,
            num_rows,
            num_features,
            1,
            eps,
        )

    def add(self, out: int, x: int, y: int, y_bytes: int, num_rows: int, num_features: int) -> None:
        """[T, D]: x + y, rounded to the type. With 0 `y_bytes`, y is one row for all."""
        row = num_features * self._size
        self._team.call(
            _run,
            *self._add,
            out,
            row,
            x,
            row,
            y,
            y_bytes,
            0,
            0,
            0,
            num_rows,
            num_features,
            1,
            0.0,
        )

    def copy(
        self, out: int, out_bytes: int, x: int, x_bytes: int, num_rows: int, num_features: int
    ) -> None:
        """[T, D], as it is."""
        self._team.call(
            _run,
            *self._copy,
            out,
            out_bytes,
            x,
            x_bytes,
            0,
            0,
            0,
            0,
            0,
            num_rows,
            num_features,
            1,
            0.0,
        )

    def silu_mul(self, out: int, gate_up: int, num_rows: int, num_features: int) -> None:
        """[T, D] from gate and up side by side, [T, 2·D]."""
        row = num_features * self._size
        self._team.call(
            _run,
            *self._gate,
            out,
            row,
            gate_up,
            2 * row,
            0,
            0,
            0,
            0,
            0,
            num_rows,
            num_features,
            1,
            0.0,
        )

    def rotate(
        self, x: int, x_bytes: int, cos: int, sin: int, num_rows: int, num_heads: int, half: int
    ) -> None:
        """In place: [T, M, 2·F] by cosine and sine [T, F], F = `half`."""
        row = half * self._size
        self._team.call(
            _run,
            *self._rotate,
            0,
            0,
            x,
            x_bytes,
            cos,
            row,
            sin,
            row,
            0,
            num_rows,
            half,
            num_heads,
            0.0,
        )
