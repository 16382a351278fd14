"""Register tiles of integer products, written as LLVM vector code like those of `simd.py`.

Owns: `integer_tile`, how the weights of a form lie for it (`WORD_CODES`, `ORDER`, `OFFSET`), what it takes activations
as (`CODE`); `spread`.
Must not know: how numbers become whole, threads.
Invariant: sums of whole numbers are exact, as long as none exceeds 32 bits, which is the caller's business; those of
floats run over the groups in order. So one result does not depend on the tile, nor on the machine.

A word is 32 bits of each of LANES columns, side by side, and holds 4 codes of 8 bits, each plus 128, or 8 codes of 4
bits, the first four in the lower halves of the bytes: [blocks, words, LANES]. The scales of each GROUP of codes, s and
with 4 bits m, are float16 where the processor widens it, else float32: [blocks, groups, 1 or 2, LANES].

Four bytes without a sign times four with one, added up in 32 bits, is one instruction where there is VNNI (vpdpbusd).
Without, bytes are taken apart into pairs of 16 bits, of which vpmaddwd multiplies and adds two: half the rate, and
activations have 16 bits then, though their numbers are the same. Nothing saturates either way. A tile also fetches the
weights of the next one's columns: without, few rows wait for memory and take a quarter longer.
"""

from collections.abc import Iterator
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from izh.kernels.cpu.simd import FEATURES, HAS_HALF, VectorCode, lanes_of
from izh.kernels.quantized import GROUP

LANES = 16
"""Columns of a block: 32-bit sums of one vector with AVX-512, of two with AVX2."""
ROWS = 4
"""Rows of a tile, at most: with VECTORS blocks their sums, the weights and one more fill the registers."""
VECTORS = lanes_of(FEATURES) // 8
"""Blocks of a tile."""


def dot_lanes(features: str) -> int:
    """Sums of the widest register whose bytes are multiplied at once, from a list of the processor's features; 0 where
    none are."""
    names = set(features.split(","))
    return 16 if {"+avx512f", "+avx512vnni"} <= names else 8 if "+avxvnni" in names else 0


_DOT_LANES = dot_lanes(FEATURES)
CODE = np.int8 if _DOT_LANES else np.int16
"""What a row's whole numbers are held as."""
ORDER = (0, 1, 2, 3) if _DOT_LANES else (0, 2, 1, 3)
"""Which of four codes a word's bytes hold: without VNNI, the even bytes are a pair of neighbours."""
WORD_CODES = {8: 4, 4: 8}
"""Codes of a word, by their bits."""
OFFSET = {8: 128, 4: 0}
"""What is added to a code, to be without a sign."""

_INT16, _INT32 = ir.IntType(16), ir.IntType(32)
_SUMS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(_INT16, 2 * LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES) if HAS_HALF else _FLOATS
_SCALE_BYTES = (2 if HAS_HALF else 4) * LANES
_WORD_BYTES = 4 * LANES


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _constant(number: int) -> ir.Value:
    return ir.Constant(_SUMS, [number] * LANES)


def spread(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """It in every lane."""
    first = builder.insert_element(ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined), number, _INT32(0))
    return _shuffle(builder, first, first, [0] * LANES)


def _multiply_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """a[2i] b[2i] + a[2i+1] b[2i+1] in 32 bits."""
    wide = ir.VectorType(_INT32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (_shuffle(builder, products, products, list(range(start, 2 * LANES, 2))) for start in (0, 1))
    return builder.add(even, odd)


def _add_dots(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, row: list[ir.Value]) -> ir.Value:
    """sums + the products of four bytes of each lane of `weights`, without signs, with a row's next four numbers."""
    if not _DOT_LANES:
        apart = weights, builder.lshr(weights, _constant(8))
        for half, pair in zip(apart, row, strict=True):
            products = _multiply_pairs(
                builder, builder.bitcast(builder.and_(half, _constant(0x00FF00FF)), _PAIRS), pair
            )
            sums = builder.add(sums, products)
        return sums
    kind = ir.VectorType(_INT32, _DOT_LANES)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * _DOT_LANES}"
    dot = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    if _DOT_LANES == LANES:
        return builder.call(dot, [sums, weights, *row])
    low, high = (
        builder.call(dot, [_shuffle(builder, each, each, list(range(at, at + 8))) for each in (sums, weights, *row)])
        for at in (0, 8)
    )
    return _shuffle(builder, low, high, list(range(LANES)))


def _masked(builder: ir.IRBuilder) -> tuple[ir.Function, ir.Function]:
    """What reads and writes some lanes of a vector of floats."""
    floats, mask, void = _FLOATS.as_pointer(), ir.VectorType(ir.IntType(1), LANES), ir.VoidType()
    kinds = {
        "load": ir.FunctionType(_FLOATS, [floats, _INT32, mask, _FLOATS]),
        "store": ir.FunctionType(void, [_FLOATS, floats, _INT32, mask]),
    }
    load, store = (
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}.v{LANES}f32.p0")
        for name, kind in kinds.items()
    )
    return load, store


@intrinsic(prefer_literal=True)
def integer_tile(
    typing_context: Any,
    bits: Any,
    num_blocks: Any,
    num_rows: Any,
    rows: Any,
    rows_at: Any,
    row_scales: Any,
    row_sums: Any,
    groups_at: Any,
    groups: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    weights_ahead: Any,
    scales: Any,
    scales_at: Any,
    scales_stride: Any,
    start: Any,
    stop: Any,
    carried: Any,
    carried_at: Any,
    added: Any,
    added_at: Any,
    added_row: Any,
    added_distance: Any,
    out: Any,
    out_at: Any,
    out_row: Any,
    num_columns: Any,
) -> Any:
    """out[i, n] = added[i, n] + sum over groups g, ascending, of t[i, g] * (s[n, g] * S), or with 4 bits of
    t[i, g] * (s[n, g] * S + m[n, g] * P), for i < num_rows <= ROWS and n < num_columns <= num_blocks * LANES; `bits`
    are 8 or 4, and `num_blocks` is a literal. S is the sum over k in g of rows[i, k] * q[n, k], P that of rows[i, k],
    whole numbers of 32 bits; all else is float32, each product and each addition rounded by itself, `added` last.

    This adds the groups [start, stop) of them. `carried` [num_rows, num_blocks * LANES] has the sums before, and gets
    those after, unless these are the first groups and the last.

    `rows` [num_rows, groups * GROUP] CODE; `row_scales` t and `row_sums` [num_rows, groups], float32 and int32: P with
    4 bits, -128 P with 8. `weights` and `scales` are bytes, as are their offsets and the distances of their blocks;
    meanwhile as many weights are fetched, from `weights_ahead` behind these on. `added` may be `out`; of its columns,
    too, there are num_columns, its blocks `added_distance` apart.
    """
    at = types.intp
    signature = types.void(
        at, num_blocks, at, rows, at, row_scales, row_sums, at, at, weights, at, at, at, scales, at, at, at, at,
        carried, at, added, at, at, at, out, at, at, at,
    )  # fmt: skip

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind, count = args[0], args[2]
        end = builder.append_basic_block("tile.end")
        choice = builder.switch(builder.add(builder.mul(kind, kind.type(ROWS + 1)), count), end)
        for width in WORD_CODES:
            for size in range(1, ROWS + 1):
                with builder.goto_block(case := builder.append_basic_block(f"tile.{width}.{size}")):
                    choice.add_case(kind.type(width * (ROWS + 1) + size), case)
                    tile(context, builder, args, width, size)
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def tile(context: Any, builder: ir.IRBuilder, args: Any, code_bits: int, count: int) -> None:
        _, _, _, x, x_at, t, p, groups_at, groups, w, w_at, w_stride, ahead, s, s_at, s_stride, *others = args
        start, stop, between, between_at, b, b_at, b_row, b_distance, o, o_at, o_row, num_columns = others
        blocks, codes = num_blocks.literal_value, WORD_CODES[code_bits]
        code, zero, one = VectorCode(context, builder), groups.type(0), groups.type(1)
        masked_load, masked_store = _masked(builder)
        words, num_scales = GROUP // codes, 1 if code_bits == 8 else 2
        group_bytes, group_scale_bytes = words * _WORD_BYTES, num_scales * _SCALE_BYTES

        def times(value: ir.Value, number: int) -> ir.Value:
            return builder.mul(value, value.type(number))

        def load(pointer: ir.Value, offset: ir.Value, more: int, kind: ir.Type, align: int) -> ir.Value:
            place = builder.gep(pointer, [builder.add(offset, offset.type(more))])
            return builder.load(builder.bitcast(place, kind.as_pointer()), align=align)

        width = times(groups, GROUP)
        x_rows = [code.row(rows, x, x_at, width, i) for i in range(count)]
        t_rows = [code.row(row_scales, t, groups_at, groups, i) for i in range(count)]
        p_rows = [code.row(row_sums, p, groups_at, groups, i) for i in range(count)]
        w_rows = [code.row(weights, w, w_at, w_stride, c) for c in range(blocks)]
        s_rows = [code.row(scales, s, s_at, s_stride, c) for c in range(blocks)]

        def places(
            array_type: Any, array: ir.Value, start: ir.Value, stride: ir.Value, distance: ir.Value
        ) -> list[ir.Value]:
            rows_of = [code.row(array_type, array, start, stride, i) for i in range(count)]
            each = [builder.gep(rows_of[i], [times(distance, c)]) for i in range(count) for c in range(blocks)]
            return [builder.bitcast(pointer, _FLOATS.as_pointer()) for pointer in each]

        totals = [cgutils.alloca_once(builder, _FLOATS) for _ in range(count * blocks)]
        kept = places(carried, between, between_at, zero.type(blocks * LANES), zero.type(LANES))
        with builder.if_else(builder.icmp_signed("==", start, zero)) as (then, otherwise):
            with then:
                for place in totals:
                    builder.store(ir.Constant(_FLOATS, [0.0] * LANES), place)
            with otherwise:
                for place, source in zip(totals, kept, strict=True):
                    builder.store(builder.load(source, align=4), place)

        def bytes_of(group: ir.Value, word: ir.Value, w_row: ir.Value) -> Iterator[ir.Value]:
            """A word of each column, in fours of bytes; fetches one of those to come."""
            place = builder.add(times(group, group_bytes), times(word, _WORD_BYTES))
            code.fetch(w_row, builder.add(place, ahead))
            packed = load(w_row, place, 0, _SUMS, 4)
            if code_bits == 8:
                yield packed
                return
            for shift in (0, 4):
                yield builder.and_(builder.lshr(packed, _constant(shift)), _constant(0x0F0F0F0F))

        def four_of(group: ir.Value, word: ir.Value, number: int, x_row: ir.Value) -> list[ir.Value]:
            """Four numbers of a row in every lane, as a word has them: of 8 bits, or two pairs of 16."""
            place = builder.add(times(group, GROUP), times(word, codes))
            if _DOT_LANES:
                return [spread(builder, load(x_row, place, 4 * number, _INT32, 1))]
            return [
                builder.bitcast(spread(builder, load(x_row, place, 4 * number + at, _INT32, 2)), _PAIRS)
                for at in (0, 2)
            ]

        def widened(s_row: ir.Value, group: ir.Value, number: int) -> ir.Value:
            found = load(s_row, times(group, group_scale_bytes), number * _SCALE_BYTES, _HALVES, 2)
            return builder.fpext(found, _FLOATS) if HAS_HALF else found

        with cgutils.for_range_slice(builder, start, stop, one, inc=True) as (group, _):
            row_sum = [spread(builder, builder.load(builder.gep(p_row, [group]))) for p_row in p_rows]
            sums = [cgutils.alloca_once(builder, _SUMS) for _ in range(count * blocks)]
            for index, place in enumerate(sums):
                builder.store(row_sum[index // blocks] if code_bits == 8 else _constant(0), place)
            with cgutils.for_range(builder, zero.type(words)) as loop:
                of_blocks = (bytes_of(group, loop.index, w_row) for w_row in w_rows)
                for number, columns in enumerate(zip(*of_blocks, strict=True)):
                    for i, x_row in enumerate(x_rows):
                        four = four_of(group, loop.index, number, x_row)
                        for c, vector in enumerate(columns):
                            place = sums[i * blocks + c]
                            builder.store(_add_dots(builder, builder.load(place), vector, four), place)
            row_scale = [spread(builder, builder.load(builder.gep(t_row, [group]))) for t_row in t_rows]
            for c, s_row in enumerate(s_rows):
                scale, *least = (widened(s_row, group, number) for number in range(num_scales))
                for i in range(count):
                    part = builder.fmul(builder.sitofp(builder.load(sums[i * blocks + c]), _FLOATS), scale)
                    for m in least:
                        part = builder.fadd(part, builder.fmul(builder.sitofp(row_sum[i], _FLOATS), m))
                    place = totals[i * blocks + c]
                    builder.store(builder.fadd(builder.load(place), builder.fmul(part, row_scale[i])), place)

        results = [builder.load(place) for place in totals]
        sources, targets = places(added, b, b_at, b_row, b_distance), places(out, o, o_at, o_row, zero.type(LANES))
        end = builder.append_basic_block("tile.done")
        is_last = builder.icmp_signed("==", stop, groups)
        whole = builder.icmp_signed("==", num_columns, num_columns.type(blocks * LANES))
        with builder.if_then(builder.not_(is_last)):
            for result, target in zip(results, kept, strict=True):
                builder.store(result, target, align=4)
            builder.branch(end)
        with builder.if_then(whole):
            for result, source, target in zip(results, sources, targets, strict=True):
                builder.store(builder.fadd(result, builder.load(source, align=4)), target, align=4)
            builder.branch(end)
        last = spread(builder, builder.trunc(num_columns, _INT32))
        for index, (result, source, target) in enumerate(zip(results, sources, targets, strict=True)):
            numbers = ir.Constant(_SUMS, [index % blocks * LANES + lane for lane in range(LANES)])
            mask = builder.icmp_signed("<", numbers, last)
            found = builder.call(masked_load, [source, _INT32(4), mask, ir.Constant(_FLOATS, [0.0] * LANES)])
            builder.call(masked_store, [builder.fadd(result, found), target, _INT32(4), mask])
        builder.branch(end)
        builder.position_at_end(end)

    return signature, codegen
