"""Register tiles of integer products, written as LLVM vector code like those of `simd.py`.

Owns: `integer_tile`, and how weights lie for it: LANES columns side by side, two steps of the width at a time,
[blocks, pairs, LANES, 2]; their scales [blocks, groups, LANES].
Must not know: how numbers become whole, threads.
Invariant: sums of whole numbers are exact, as long as none exceeds 32 bits, which is the caller's business; those of
floats run over the groups in order. So one result does not depend on the tile, nor on the machine.

A pair of 16-bit numbers times a pair, added up in 32 bits, is one instruction on x86 (vpmaddwd), and with the addition
to the running sum still one where there is VNNI (vpdpwssd): the code generator finds both in what is written here, and
on other machines their own. Nothing saturates on the way.
"""

from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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

_INT16, _INT32 = ir.IntType(16), ir.IntType(32)
_SUMS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(ir.FloatType(), LANES)
_PAIRS, _BYTES = ir.VectorType(_INT16, 2 * LANES), ir.VectorType(ir.IntType(8), 2 * LANES)


def _shuffle(builder: ir.IRBuilder, vector: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _multiply_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """a[2i] b[2i] + a[2i+1] b[2i+1] in 32 bits."""
    wide = ir.VectorType(_INT32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (_shuffle(builder, products, list(range(start, 2 * LANES, 2))) for start in (0, 1))
    return builder.add(even, odd)


@intrinsic(prefer_literal=True)
def integer_tile(
    typing_context: Any,
    rows: Any,
    rows_at: Any,
    weights: Any,
    weights_at: Any,
    scales: Any,
    scales_at: Any,
    width: Any,
    group: Any,
    out: Any,
    num_rows: Any,
    num_blocks: Any,
) -> Any:
    """out[i, c * LANES + j] = sum over groups g, ascending, of scales[c, g, j] * sum over k in g of rows[i, k] *
    weights[c, k / 2, j, k % 2], for i < num_rows and c < num_blocks, both literals. The inner sums are whole numbers of
    32 bits; the outer ones float32, each product and each addition rounded by itself.

    `rows` [num_rows, width] int16, `weights` int8; `width` and `group` are even. The last group may be short.
    """
    at = types.intp
    signature = types.void(rows, at, weights, at, scales, at, at, at, out, num_rows, num_blocks)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, x_at, w, w_at, s, s_at, width, group, o, _, _ = args
        count, blocks = num_rows.literal_value, num_blocks.literal_value
        zero, one, two, lanes = (width.type(number) for number in (0, 1, 2, LANES))
        pairs, step = builder.sdiv(width, two), builder.sdiv(group, two)
        groups = builder.sdiv(builder.sub(builder.add(pairs, step), one), step)

        def row(array_type: Any, array: ir.Value, start: ir.Value, stride: ir.Value, index: int) -> ir.Value:
            data = context.make_array(array_type)(context, builder, array).data
            return builder.gep(data, [builder.add(start, builder.mul(stride, stride.type(index)))])

        def vector_at(pointer: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
            return builder.bitcast(builder.gep(pointer, [offset]), kind.as_pointer())

        x_rows = [
            builder.bitcast(row(rows, x, x_at, width, i), _INT32.as_pointer())  # a pair at a time
            for i in range(count)
        ]
        w_rows = [row(weights, w, w_at, builder.mul(width, lanes), c) for c in range(blocks)]
        s_rows = [row(scales, s, s_at, builder.mul(groups, lanes), c) for c in range(blocks)]
        sums, totals = (
            [cgutils.alloca_once(builder, kind) for _ in range(count * blocks)] for kind in (_SUMS, _FLOATS)
        )
        for place in totals:
            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), place)

        def add_pair(pair: ir.Value) -> None:
            w_now = []
            for w_row in w_rows:
                vector = builder.load(vector_at(w_row, builder.mul(pair, pair.type(2 * LANES)), _BYTES), align=1)
                w_now.append(builder.sext(vector, _PAIRS))
            for i, x_row in enumerate(x_rows):
                both = builder.load(builder.gep(x_row, [pair]), align=2)
                first = builder.insert_element(ir.Constant(_SUMS, ir.Undefined), both, _INT32(0))
                spread = builder.bitcast(_shuffle(builder, first, [0] * LANES), _PAIRS)
                for c, vector in enumerate(w_now):
                    place = sums[i * blocks + c]
                    product = _multiply_pairs(builder, spread, vector)
                    builder.store(builder.add(builder.load(place), product), place)

        with cgutils.for_range_slice(builder, zero, pairs, step, inc=True) as (start, number):
            for place in sums:
                builder.store(ir.Constant(_SUMS, [0] * LANES), place)
            end = builder.add(start, step)
            stop = builder.select(builder.icmp_signed("<", end, pairs), end, pairs)
            with cgutils.for_range_slice(builder, start, stop, one, inc=True) as (pair, _):
                add_pair(pair)
            for c, s_row in enumerate(s_rows):
                scale = builder.load(vector_at(s_row, builder.mul(number, lanes), _FLOATS), align=4)
                for i in range(count):
                    place = totals[i * blocks + c]
                    product = builder.fmul(builder.sitofp(builder.load(sums[i * blocks + c]), _FLOATS), scale)
                    builder.store(builder.fadd(builder.load(place), product), place)
        o_row = row(out, o, zero, zero, 0)
        for index, place in enumerate(totals):
            builder.store(builder.load(place), vector_at(o_row, zero.type(index * LANES), _FLOATS), align=4)
        return context.get_dummy_value()

    return signature, codegen
