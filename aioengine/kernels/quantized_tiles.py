"""What a tile of weights of 8 or 4 bits does with a few rows: LLVM IR. Needs numba.

Blocks are those of layers/quantized_format.py: 16 outputs' scales, minima and codes, so that lanes
of a vector belong to one output each. Codes of a group are multiplied and summed up first, then
scaled once: y += scale · Σ code · x + minimum · Σ x.

**Two ways.** By floats: codes become float32 and meet x in float32, so that the result is the
function that the dequantised weights stand for. By integers: x is rounded, in each group, to 8 bits
with a scale of its own; sums of products of bytes are exact, and take a quarter of the instructions
(AVX2), or an eighth (AVX-512 with VNNI), with the same results. It is for x in a half type, which
is rounded anyway.

**Rows of x** are prepared in strips of up to MAX_ROWS rows, which share a pass over a tile; for
more strips, the tile is read again, from cache. Of each group a strip has its rows' blocks one
after the other. By floats such a block is 32 float32 and their sum. By integers it is 32 codes,
then float32 scale, float32 scale · Σ code, and int32 -128 · Σ code.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from aioengine.kernels.codegen import (
    F16,
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
MAX_ROWS: Final = 8 if REGISTER_LANES == TILE else 4
"""Of a strip: as many sums, twice, fit the registers."""
INTEGERS: Final = "+avx2" in FEATURES
"""Whether this processor's instructions multiply bytes in the ways that are written here."""
_FOURS: Final = {"+avx512f", "+avx512vnni"} <= FEATURES
"""Whether one of them adds up four products of bytes, in each of 16 lanes."""
_INTEGER_LANES: Final = 16 if _FOURS else 8

X_SCALE: Final = GROUP
X_SUM: Final = {True: GROUP + 4, False: 4 * GROUP}
X_START: Final = GROUP + 8
X_BYTES: Final = {True: 48, False: 4 * GROUP + 4}
"""Of a block of x, and where in it something lies; by integers or not."""
UNSIGNED: Final = 128
"""Is added to 8-bit codes where an instruction wants them unsigned; X_START takes it back."""


def _codes_at(bits: int, scale: Any) -> int:
    """Where in a block the codes begin: behind the scales and, with 4 bits, the minima."""
    return TILE * bytes_of(scale) * (2 if bits == 4 else 1)


def _block_bytes(bits: int, scale: Any) -> int:
    return _codes_at(bits, scale) + TILE * GROUP * bits // 8


INT8_BLOCK_BYTES: Final = _block_bytes(8, F16)
INT4_BLOCK_BYTES: Final = _block_bytes(4, F16)
INT4_WIDE_BLOCK_BYTES: Final = _block_bytes(4, F32)
"""With float32 scales."""
_AHEAD_BYTES: Final = 4096
"""Of what is being read, to where memory is asked for more. Without it, weights that are read for
one row come at 60 % of the speed."""
_INT: Final = types.int64
_I1: Final = ir.IntType(1)


# --- one tile -------------------------------------------------------------------------------------


class _Tile:
    """IR of the products of one tile with `num_rows` rows of x.

    Groups, rows and parts of a tile (vectors of `lanes` outputs) are what it counts.
    """

    def __init__(self, code: Code, num_rows: int, bits: int, scale: Any, by_integers: bool) -> None:
        self.code = code
        self.builder = code.builder
        self.num_rows = num_rows
        self.bits = bits
        self.scale = scale
        self.by_integers = by_integers
        self.parts = range(TILE // code.lanes)
        self.scales_bytes = TILE * bytes_of(scale)
        self.codes_at = _codes_at(bits, scale)
        self.block_bytes = _block_bytes(bits, scale)

    def plus(self, address: Any, num_bytes: int) -> Any:
        return self.builder.add(address, self.code.const(num_bytes))

    def scales(self, block: Any, place: int, part: int) -> Any:
        """Of a part's outputs: scales (place 0) or minima (1)."""
        at = place * self.scales_bytes + part * self.code.lanes * bytes_of(self.scale)
        return self.code.load_elements(self.plus(block, at), self.scale)

    def codes(self, block: Any, offset: Any, part: int) -> Any:
        """Int32 vector: four bytes of each output of a part."""
        at = self.builder.add(self.plus(block, self.codes_at + part * self.code.lanes * 4), offset)
        return self.code.load(at, self.code.ints)

    def of_x(self, x: Any, row: int, at: int) -> Any:
        """Four bytes of a row's block in every lane, as float32."""
        address = self.plus(x, row * X_BYTES[self.by_integers] + at)
        return self.code.splat(self.code.load(address, F32))

    def prefetch(self, address: Any) -> None:
        byte = self.builder.inttoptr(address, I8.as_pointer())
        self.code.call("llvm.prefetch.p0i8", ir.VoidType(), byte, I32(0), I32(3), I32(1))

    def bytes_of(self, block: Any, chunk: int) -> list[list[Any]]:
        """Codes of four inputs a lane, of the parts, in vectors of bytes: first of the inputs from
        4 · chunk on; of 4-bit codes also of those 16 behind them."""
        code, builder = self.code, self.builder
        octets = ir.VectorType(I8, code.lanes * 4)
        stored = [self.codes(block, code.const(4 * TILE * chunk), part) for part in self.parts]
        halves = [stored]
        if self.bits == 4:
            halves.append([builder.lshr(each, code.fill(4)) for each in stored])
            low = code.fill(0x0F0F0F0F)
            halves = [[builder.and_(each, low) for each in half] for half in halves]
        return [[builder.bitcast(each, octets) for each in half] for half in halves]


def _group_by_floats(tile: _Tile, block: Any, x: Any) -> list[Any]:
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
                    value = tile.of_x(here, row, 4 * byte + 64 * half)
                    for part in tile.parts:
                        place = row * len(tile.parts) + part
                        sums[place] = code.fma(weights[part], value, sums[place])
        return sums

    start = [code.zero] * (tile.num_rows * len(tile.parts))
    return code.loop(code.const(tile.bits), start, lambda i, sums: add(i, list(sums)))


def _group_by_fours(tile: _Tile, block: Any, x: Any) -> list[Any]:
    """The same of codes of x, as int32, by VNNI."""
    code, builder = tile.code, tile.builder
    octets = ir.VectorType(I8, code.lanes * 4)
    if tile.bits == 4:
        sums = [code.fill(0)] * tile.num_rows
    else:
        starts = [tile.of_x(x, row, X_START) for row in range(tile.num_rows)]
        sums = [builder.bitcast(start, code.ints) for start in starts]
    for chunk in range(tile.bits):
        for half, (weights,) in enumerate(tile.bytes_of(block, chunk)):
            if tile.bits == 8:
                weights = builder.xor(weights, ir.Constant(octets, [UNSIGNED] * octets.count))
            for row in range(tile.num_rows):
                bytes_x = builder.bitcast(tile.of_x(x, row, 4 * chunk + 16 * half), octets)
                sums[row] = code.call(
                    "llvm.x86.avx512.vpdpbusd.512", code.ints, sums[row], weights, bytes_x
                )
    return sums


def _group_by_pairs(tile: _Tile, block: Any, x: Any) -> list[Any]:
    """The same, by AVX2."""
    code, builder = tile.code, tile.builder
    octets = ir.VectorType(I8, code.lanes * 4)
    words = ir.VectorType(I16, code.lanes * 2)
    ones = ir.Constant(words, [1] * words.count)

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
    start = ir.Constant(words if in_words else code.ints, None)
    sums = [start] * (tile.num_rows * len(tile.parts))
    for chunk in range(tile.bits):
        for half, weights in enumerate(tile.bytes_of(block, chunk)):
            for row in range(tile.num_rows):
                bytes_x = builder.bitcast(tile.of_x(x, row, 4 * chunk + 16 * half), octets)
                for part in tile.parts:
                    place = row * len(tile.parts) + part
                    sums[place] = add(weights[part], bytes_x, sums[place])
    return [fours_of(each) for each in sums] if in_words else sums


def _add_groups(tile: _Tile, groups: Any, blocks: Any, x: Any) -> list[Any]:
    """The results of a tile: for rows, and of these for parts."""
    code, builder = tile.code, tile.builder
    places = [(row, part) for row in range(tile.num_rows) for part in tile.parts]
    x_bytes = tile.num_rows * X_BYTES[tile.by_integers]
    by_bytes = _group_by_fours if _FOURS else _group_by_pairs

    def add(g: Any, totals: list[Any]) -> list[Any]:
        block, here = code.at(blocks, g, tile.block_bytes), code.at(x, g, x_bytes)
        for line in range(0, tile.block_bytes, 64):
            tile.prefetch(tile.plus(block, line + _AHEAD_BYTES))
        if tile.by_integers:
            sums = [builder.sitofp(each, code.floats) for each in by_bytes(tile, block, here)]
        else:
            sums = _group_by_floats(tile, block, here)
        scales = [tile.scales(block, 0, part) for part in tile.parts]
        minima = [tile.scales(block, 1, part) for part in tile.parts] if tile.bits == 4 else []
        results = []
        for (row, part), product, total in zip(places, sums, totals, strict=True):
            if tile.by_integers:
                product = builder.fmul(product, tile.of_x(here, row, X_SCALE))
            total = code.fma(scales[part], product, total)
            if minima:
                x_sum = tile.of_x(here, row, X_SUM[tile.by_integers])
                total = code.fma(minima[part], x_sum, total)
            results.append(total)
        return results

    return code.loop(groups, [code.zero] * len(places), add)


def tile_of(bits: int, scale: Any, by_integers: bool) -> Any:
    """A function of compiled code: one tile with a strip of x."""
    lanes = _INTEGER_LANES if by_integers else min(REGISTER_LANES, TILE)

    @intrinsic
    def tile_products(
        typing: Any, num_rows: Any, num_groups: Any, blocks: Any, x: Any, out: Any
    ) -> Any:
        """`num_rows` (1 to MAX_ROWS) × 16 float32 to `out`. Addresses."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            num_rows, groups, blocks, x, out = args
            code = Code(builder, lanes)

            def emit(n: int) -> None:
                tile = _Tile(code, n, bits, scale, by_integers)
                for place, result in enumerate(_add_groups(tile, groups, blocks, x)):
                    code.store(result, tile.plus(out, 4 * lanes * place))

            code.for_each_count(num_rows, MAX_ROWS, emit)
            return context.get_dummy_value()

        return types.void(*[_INT] * 5), generate

    return tile_products
