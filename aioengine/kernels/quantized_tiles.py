"""What a tile of weights of 8 or 4 bits does with a few rows: LLVM IR. Needs numba.

Blocks are those of layers/quantized_format.py: 16 outputs' scales, minima and codes, so that lanes
of a vector belong to one output each. Codes of a group are multiplied and summed up first, then
scaled once: y += scale · Σ code · x + minimum · Σ x. Up to MAX_ROWS rows of x share a pass over a
tile; for more, the tile is read again, from the first-level cache.

**Two ways.** By floats: codes become float32 and meet x in float32, so that the result is the
function that the dequantised weights stand for. By integers: x is rounded, in each group, to 8 bits
with a scale of its own; sums of products of bytes are exact, and a quarter of the instructions. It
takes AVX2, and x in a half type, which is rounded anyway.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    REGISTER_LANES,
    Code,
    bytes_of,
)

GROUP: Final = 32
TILE: Final = 16
MAX_ROWS: Final = 4
"""Rows of x that share a pass over a tile."""
_AHEAD_BYTES: Final = 4096
"""Of what is being read, to where memory is asked for more. Without it, weights that are read for
one row come at 60 % of the speed."""
_INT: Final = types.int64
_I1: Final = ir.IntType(1)


INTEGERS: Final = "+avx2" in FEATURES
"""Whether this processor's instructions multiply bytes in the way that is written here."""
_INTEGER_LANES: Final = 8


# --- one tile -------------------------------------------------------------------------------------


class _Tile:
    """IR of the products of one tile with `num_rows` rows of x.

    Groups, rows and parts of a tile (vectors of `lanes` outputs) are what it counts. Addresses of
    the current group: `block`, and of the first row's `x`, `x_scale` and `x_sum`.
    """

    def __init__(
        self, code: Code, num_rows: int, bits: int, scale: Any, strides: tuple[Any, Any]
    ) -> None:
        self.code = code
        self.builder = code.builder
        self.num_rows = num_rows
        self.bits = bits
        self.scale = scale
        self.x_stride, self.scales_stride = strides
        self.parts = range(TILE // code.lanes)
        self.scales_bytes = TILE * bytes_of(scale)
        self.codes_at = self.scales_bytes * (2 if bits == 4 else 1)
        self.block_bytes = self.codes_at + TILE * GROUP * bits // 8

    def plus(self, address: Any, num_bytes: int) -> Any:
        return self.builder.add(address, self.code.const(num_bytes))

    def row(self, address: Any, stride: Any, row: int) -> Any:
        return self.builder.add(address, self.builder.mul(stride, self.code.const(row)))

    def scales(self, block: Any, place: int, part: int) -> Any:
        """Of a part's outputs: scales (place 0) or minima (1)."""
        at = place * self.scales_bytes + part * self.code.lanes * bytes_of(self.scale)
        return self.code.load_elements(self.plus(block, at), self.scale)

    def codes(self, block: Any, offset: Any, part: int) -> Any:
        """Int32 vector: four bytes of each output of a part."""
        at = self.builder.add(self.plus(block, self.codes_at + part * self.code.lanes * 4), offset)
        return self.code.load(at, self.code.ints)

    def bytes_of_x(self, x: Any, kind: Any) -> Any:
        """Four codes of x in every lane."""
        four = self.code.load(x, F32)
        return self.builder.bitcast(self.code.splat(four), kind)

    def prefetch(self, address: Any) -> None:
        byte = self.builder.inttoptr(address, I8.as_pointer())
        self.code.call("llvm.prefetch.p0i8", ir.VoidType(), byte, I32(0), I32(3), I32(1))

    def scalar(self, address: Any, row: int) -> Any:
        return self.code.splat(self.code.load(self.row(address, self.scales_stride, row), F32))


def _group_by_floats(tile: _Tile, block: Any, x: Any, sums: list[Any]) -> list[Any]:
    """Σ code · x of one group, for rows and of these for parts."""
    code, builder = tile.code, tile.builder

    def widened(chunks: Any, byte: int, half: int) -> Any:
        if tile.bits == 8:
            moved = builder.shl(chunks, code.fill(24 - 8 * byte))
            return builder.sitofp(builder.ashr(moved, code.fill(24)), code.floats)
        moved = builder.lshr(chunks, code.fill(8 * byte + 4 * half))
        return builder.sitofp(builder.and_(moved, code.fill(15)), code.floats)

    def add(i: Any, sums: list[Any]) -> list[Any]:
        chunks = [tile.codes(block, builder.mul(i, code.const(4 * TILE)), p) for p in tile.parts]
        here = code.at(x, i, 16)
        for byte in range(4):
            for half in range(8 // tile.bits):
                weights = [widened(each, byte, half) for each in chunks]
                for row in range(tile.num_rows):
                    at = tile.row(tile.plus(here, 4 * byte + 64 * half), tile.x_stride, row)
                    value = code.splat(code.load(at, F32))
                    for part in tile.parts:
                        place = row * len(tile.parts) + part
                        sums[place] = code.fma(weights[part], value, sums[place])
        return sums

    return code.loop(code.const(tile.bits), sums, lambda i, sums: add(i, list(sums)))


def _group_by_integers(tile: _Tile, block: Any, x: Any) -> list[Any]:
    """The same of codes of x, as int32."""
    code, builder = tile.code, tile.builder
    octets = ir.VectorType(I8, code.lanes * 4)
    words = ir.VectorType(I16, code.lanes * 2)
    ones = ir.Constant(words, [1] * words.count)
    num_sums = tile.num_rows * len(tile.parts)

    def fill(value: int) -> ir.Constant:
        return ir.Constant(octets, [value] * octets.count)

    def pairs_of(a: Any, b: Any) -> Any:
        """Sums of two neighbouring products, int16."""
        return code.call("llvm.x86.avx2.pmadd.ub.sw", words, a, b)

    def fours_of(pairs: Any) -> Any:
        return code.call("llvm.x86.avx2.pmadd.wd", code.ints, pairs, ones)

    def add(weights: Any, bytes_x: Any, total: Any) -> Any:
        if tile.bits == 4:
            return builder.add(total, pairs_of(weights, bytes_x))
        size = code.call(f"llvm.abs.v{octets.count}i8", octets, weights, ir.Constant(_I1, 0))
        signed = code.call("llvm.x86.avx2.psign.b", octets, bytes_x, weights)
        return builder.add(total, fours_of(pairs_of(size, signed)))

    # Eight sums of two products of 15 · 127 fit int16.
    in_words = tile.bits == 4
    sums = [ir.Constant(words if in_words else code.ints, None)] * num_sums
    for chunk in range(tile.bits):
        stored = [
            builder.bitcast(tile.codes(block, code.const(4 * TILE * chunk), part), octets)
            for part in tile.parts
        ]
        for half in range(8 // tile.bits):
            weights = stored
            if tile.bits == 4:
                if half:
                    shifted = [builder.bitcast(each, words) for each in stored]
                    four = ir.Constant(words, [4] * words.count)
                    weights = [builder.bitcast(builder.lshr(w, four), octets) for w in shifted]
                weights = [builder.and_(each, fill(15)) for each in weights]
            for row in range(tile.num_rows):
                at = tile.row(tile.plus(x, 4 * chunk + 16 * half), tile.x_stride, row)
                bytes_x = tile.bytes_of_x(at, octets)
                for part in tile.parts:
                    place = row * len(tile.parts) + part
                    sums[place] = add(weights[part], bytes_x, sums[place])
    return [fours_of(each) for each in sums] if in_words else sums


def _add_groups(
    tile: _Tile, by_integers: bool, groups: Any, blocks: Any, x: Any, x_scales: Any, x_sums: Any
) -> list[Any]:
    """The results of a tile: for rows, and of these for parts."""
    code, builder = tile.code, tile.builder
    places = [(row, part) for row in range(tile.num_rows) for part in tile.parts]
    x_bytes = GROUP * (1 if by_integers else 4)

    def add(g: Any, totals: list[Any]) -> list[Any]:
        block, here = code.at(blocks, g, tile.block_bytes), code.at(x, g, x_bytes)
        for line in range(0, tile.block_bytes, 64):
            tile.prefetch(tile.plus(block, line + _AHEAD_BYTES))
        if by_integers:
            sums = [
                builder.sitofp(each, code.floats) for each in _group_by_integers(tile, block, here)
            ]
        else:
            sums = _group_by_floats(tile, block, here, [code.zero] * len(places))
        scales = [tile.scales(block, 0, part) for part in tile.parts]
        minima = [tile.scales(block, 1, part) for part in tile.parts] if tile.bits == 4 else []
        results = []
        for (row, part), product, total in zip(places, sums, totals, strict=True):
            x_sum = tile.scalar(code.at(x_sums, g, 4), row)
            if by_integers:
                product = builder.fmul(product, tile.scalar(code.at(x_scales, g, 4), row))
            total = code.fma(scales[part], product, total)
            results.append(code.fma(minima[part], x_sum, total) if minima else total)
        return results

    return code.loop(groups, [code.zero] * len(places), add)


def tile_of(bits: int, scale: Any, by_integers: bool) -> Any:
    """A function of compiled code: one tile with a few rows of x."""
    lanes = _INTEGER_LANES if by_integers else min(REGISTER_LANES, TILE)

    @intrinsic
    def tile_products(
        typing: Any,
        num_rows: Any,
        num_groups: Any,
        blocks: Any,
        x: Any,
        x_scales: Any,
        x_sums: Any,
        x_stride: Any,
        scales_stride: Any,
        out: Any,
    ) -> Any:
        """`num_rows` (1 to MAX_ROWS) × 16 float32 to `out`. Addresses; strides in bytes."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            num_rows, groups, blocks, x, x_scales, x_sums, x_stride, scales_stride, out = args
            code = Code(builder, lanes)

            def emit(n: int) -> None:
                tile = _Tile(code, n, bits, scale, (x_stride, scales_stride))
                results = _add_groups(tile, by_integers, groups, blocks, x, x_scales, x_sums)
                for place, result in enumerate(results):
                    code.store(result, tile.plus(out, 4 * lanes * place))

            code.for_each_count(num_rows, MAX_ROWS, emit)
            return context.get_dummy_value()

        return types.void(*[_INT] * 9), generate

    return tile_products
