"""Register tiles of integer products, written as LLVM vector code like those of `simd.py`.

Owns: `integer_tile`, and how the weights of a form lie for it, as bytes: LANES columns side by side, a word at a time.
Must not know: how numbers become whole, threads.
Invariant: sums of whole numbers are exact, as long as none exceeds 32 bits, which is the caller's business; those of
floats run over the groups in order. So one result does not depend on the tile, nor on the machine.

              a word of a column                                                of a group
    8 bits    2 codes: [blocks, words, LANES, 2] int8                           s: [blocks, groups, LANES] float32
    4 bits    32 codes: [blocks, words, 4, LANES] 32 bits, of which code 2i     s and m: [blocks, groups, 2, LANES]
              lies from bit 4i on, and code 2i + 1 from bit 16 + 4i on: a       float16, where the processor widens it,
              mask makes a pair of them                                         else float32

A pair of 16-bit numbers times a pair, added up in 32 bits, is one instruction on x86 (vpmaddwd), and with the addition
to the running sum still one where there is VNNI (vpdpwssd): the code generator finds both in what is written here, and
on other machines their own. Nothing saturates on the way. A tile also fetches the weights of the next one's columns:
without, few rows wait for memory and take a quarter longer.
"""

from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from izh.kernels.cpu.simd import HAS_HALF, VectorCode

LANES = 16
"""Columns of a block: 32-bit sums of one vector with AVX-512, of two with AVX2."""
ROWS = 6
"""Rows of a tile, at most: with VECTORS blocks their sums, the weights and one more fill the registers."""


def _has_wide_registers() -> bool:
    """Whether kernels are compiled for AVX-512, which numba may have been told not to."""
    chosen = numba.config.CPU_FEATURES
    if chosen is not None:
        return "+avx512bw" in chosen
    return numba.config.CPU_NAME in (None, "host") and bool(llvm.get_host_cpu_features().get("avx512bw"))


VECTORS = 2 if _has_wide_registers() else 1
"""Blocks of a tile."""
WORD_CODES = {8: 2, 4: 32}
"""Codes of a word, by their bits."""
GROUP_BYTES = {8: 4 * LANES, 4: (4 if HAS_HALF else 8) * LANES}
"""What lies beside the codes of a block's group."""

_INT16, _INT32 = ir.IntType(16), ir.IntType(32)
_SUMS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(ir.FloatType(), LANES)
_PAIRS, _BYTES = ir.VectorType(_INT16, 2 * LANES), ir.VectorType(ir.IntType(8), 2 * LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES) if HAS_HALF else _FLOATS


def _shuffle(builder: ir.IRBuilder, vector: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _constant(number: int) -> ir.Value:
    return ir.Constant(_SUMS, [number] * LANES)


def _spread(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """It in every lane."""
    first = builder.insert_element(ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined), number, _INT32(0))
    return _shuffle(builder, first, [0] * LANES)


def _multiply_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """a[2i] b[2i] + a[2i+1] b[2i+1] in 32 bits."""
    wide = ir.VectorType(_INT32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (_shuffle(builder, products, list(range(start, 2 * LANES, 2))) for start in (0, 1))
    return builder.add(even, odd)


@intrinsic(prefer_literal=True)
def integer_tile(
    typing_context: Any,
    bits: Any,
    num_blocks: Any,
    num_rows: Any,
    rows: Any,
    rows_at: Any,
    group_sums: Any,
    group_sums_at: Any,
    weights: Any,
    weights_at: Any,
    scales: Any,
    scales_at: Any,
    width: Any,
    group: Any,
    out: Any,
) -> Any:
    """out[i, c * LANES + j] = sum over groups g, ascending, of s[c, g, j] * sum over k in g of rows[i, k] * q[c, k, j],
    and with 4 bits + m[c, g, j] * group_sums[i, g], for c < num_blocks, a literal as `bits`, and i < num_rows <= ROWS.
    The inner sums are whole numbers of 32 bits; all else float32, each product and each addition rounded by itself, the
    two products added first.

    `rows` [num_rows, width] int16, `group_sums` [num_rows, groups] float32; `weights` and `scales` bytes, as their
    offsets. `width` and `group` are whole words. The last group may be short.
    """
    at = types.intp
    signature = types.void(bits, num_blocks, at, rows, at, group_sums, at, weights, at, scales, at, at, at, out)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        count = args[2]
        end = builder.append_basic_block("tile.end")
        choice = builder.switch(count, end)
        for size in range(1, ROWS + 1):
            with builder.goto_block(case := builder.append_basic_block(f"tile.{size}")):
                choice.add_case(count.type(size), case)
                tile(context, builder, args, size)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def tile(context: Any, builder: ir.IRBuilder, args: Any, count: int) -> None:
        _, _, _, x, x_at, p, p_at, w, w_at, s, s_at, width, group, o = args
        blocks, codes = num_blocks.literal_value, WORD_CODES[bits.literal_value]
        group_bytes, code = GROUP_BYTES[bits.literal_value], VectorCode(context, builder)
        zero, one = width.type(0), width.type(1)
        words, step = (builder.sdiv(size, size.type(codes)) for size in (width, group))
        groups = builder.sdiv(builder.sub(builder.add(words, step), one), step)
        word_bytes = codes * bits.literal_value // 8 * LANES

        def row(array_type: Any, array: ir.Value, start: ir.Value, stride: ir.Value, index: int) -> ir.Value:
            data = context.make_array(array_type)(context, builder, array).data
            return builder.gep(data, [builder.add(start, builder.mul(stride, stride.type(index)))])

        def vector_at(pointer: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
            return builder.bitcast(builder.gep(pointer, [offset]), kind.as_pointer())

        def times(value: ir.Value, number: int) -> ir.Value:
            return builder.mul(value, value.type(number))

        x_rows = [
            builder.bitcast(row(rows, x, x_at, width, i), _INT32.as_pointer())  # a pair at a time
            for i in range(count)
        ]
        p_rows = [row(group_sums, p, p_at, groups, i) for i in range(count)]
        w_rows = [row(weights, w, w_at, times(words, word_bytes), c) for c in range(blocks)]
        s_rows = [row(scales, s, s_at, times(groups, group_bytes), c) for c in range(blocks)]
        sums, totals = (
            [cgutils.alloca_once(builder, kind) for _ in range(count * blocks)] for kind in (_SUMS, _FLOATS)
        )
        for place in totals:
            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), place)

        def pairs_of(word: ir.Value, w_row: ir.Value) -> Iterator[ir.Value]:
            """A word of each column, as pairs of 16-bit numbers; fetches that of the next tile's column."""
            place = times(word, word_bytes)
            ahead = builder.add(place, times(words, word_bytes * blocks))
            if bits.literal_value == 8:
                code.fetch(w_row, ahead)
                yield builder.sext(builder.load(vector_at(w_row, place, _BYTES), align=1), _PAIRS)
                return
            for start in range(0, word_bytes, 4 * LANES):
                code.fetch(w_row, builder.add(ahead, place.type(start)))
                packed = builder.load(vector_at(w_row, builder.add(place, place.type(start)), _SUMS), align=4)
                for shift in range(0, 16, 4):
                    shifted = builder.lshr(packed, _constant(shift))
                    yield builder.bitcast(builder.and_(shifted, _constant(0x000F000F)), _PAIRS)

        def add_word(word: ir.Value) -> None:
            for number, columns in enumerate(zip(*(pairs_of(word, w_row) for w_row in w_rows), strict=True)):
                pair = builder.add(times(word, codes // 2), word.type(number))
                for i, x_row in enumerate(x_rows):
                    both = builder.load(builder.gep(x_row, [pair]), align=2)
                    spread = builder.bitcast(_spread(builder, both), _PAIRS)
                    for c, vector in enumerate(columns):
                        place = sums[i * blocks + c]
                        product = _multiply_pairs(builder, spread, vector)
                        builder.store(builder.add(builder.load(place), product), place)

        def scales_of(number: ir.Value, s_row: ir.Value) -> list[ir.Value]:
            """s of a group, and m with 4 bits."""
            place = times(number, group_bytes)
            if bits.literal_value == 8:
                return [builder.load(vector_at(s_row, place, _FLOATS), align=4)]
            starts = (builder.add(place, place.type(start)) for start in (0, group_bytes // 2))
            found = [builder.load(vector_at(s_row, at, _HALVES), align=2) for at in starts]
            return [builder.fpext(each, _FLOATS) for each in found] if HAS_HALF else found

        with cgutils.for_range_slice(builder, zero, words, step, inc=True) as (start, number):
            for place in sums:
                builder.store(ir.Constant(_SUMS, [0] * LANES), place)
            end = builder.add(start, step)
            stop = builder.select(builder.icmp_signed("<", end, words), end, words)
            with cgutils.for_range_slice(builder, start, stop, one, inc=True) as (word, _):
                add_word(word)
            for c, s_row in enumerate(s_rows):
                scale, *least = scales_of(number, s_row)
                for i in range(count):
                    place = totals[i * blocks + c]
                    part = builder.fmul(builder.sitofp(builder.load(sums[i * blocks + c]), _FLOATS), scale)
                    for m in least:
                        group_sum = _spread(builder, builder.load(builder.gep(p_rows[i], [number])))
                        part = builder.fadd(part, builder.fmul(group_sum, m))
                    builder.store(builder.fadd(builder.load(place), part), place)
        o_row = row(out, o, zero, zero, 0)
        for index, place in enumerate(totals):
            builder.store(builder.load(place), vector_at(o_row, zero.type(index * LANES), _FLOATS), align=4)

    return signature, codegen
