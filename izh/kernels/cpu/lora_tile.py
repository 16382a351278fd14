"""Register tiles of the low-rank corrections, for rows that lie anywhere: low = A x and y += B low.

Owns: `shrink_tile` and `expand_tile`. Must not know: adapters, threads.
Invariant: the order of arithmetic of one result is fixed, however many rows or columns share the tile.

Arrays as in `simd.py`: `*_at` is an offset in elements, `*_stride` the distance between rows.
"""

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from izh.kernels.cpu.simd import LANES, VectorCode


@intrinsic(prefer_literal=True)
def shrink_tile(
    typing_context: Any,
    rows: Any,
    rows_at: Any,
    keys: Any,
    keys_at: Any,
    keys_stride: Any,
    width: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    num_keys: Any,
) -> Any:
    """out[i, j] = sum over d < width of rows[rows_at[i] + d] * keys[j, d], j < num_keys.

    `rows_at` is a tuple of offsets, `width` a multiple of LANES, `num_keys` a literal, 4 or 8; rows x keys, at most 12,
    is what stays in registers. The bits are those of `dot_tile_ahead`.
    """
    at = types.intp
    signature = types.void(rows, types.UniTuple(at, len(rows_at)), keys, at, at, at, out, at, at, num_keys)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        q, q_at, k, k_at, k_stride, stop, o, o_at, o_stride, _ = args
        code, zero, wide = VectorCode(context, builder), stop.type(0), num_keys.literal_value
        q_rows = [code.row(rows, q, each, zero, 0) for each in cgutils.unpack_tuple(builder, q_at)]
        k_rows = [code.row(keys, k, k_at, k_stride, j) for j in range(wide)]
        code.dot(q_rows, k_rows, stop, [code.row(out, o, o_at, o_stride, i) for i in range(len(q_rows))])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def expand_tile(
    typing_context: Any,
    low: Any,
    low_at: Any,
    low_stride: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    rank: Any,
    out: Any,
    out_at: Any,
    num_vectors: Any,
) -> Any:
    """out[out_at[i] + e] += sum over j < rank, ascending, of low[i, j] * weights[j, e], e < num_vectors * LANES.

    `out_at` is a tuple of offsets, `num_vectors` a literal; their product, at most 12, is what stays in registers.
    """
    at = types.intp
    signature = types.void(
        low, at, at, weights, at, at, at, out, types.UniTuple(at, len(out_at)), num_vectors
    )  # fmt: skip

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        lo, lo_at, lo_stride, w, w_at, w_stride, stop, o, o_at, _ = args
        code, wide = VectorCode(context, builder), num_vectors.literal_value
        lanes = [stop.type(c * LANES) for c in range(wide)]
        out_rows = [code.row(out, o, each, stop.type(0), 0) for each in cgutils.unpack_tuple(builder, o_at)]
        low_rows = [code.row(low, lo, lo_at, lo_stride, i) for i in range(len(out_rows))]
        weight_row = code.row(weights, w, w_at, w_stride, 0)
        sums = code.registers(len(out_rows) * wide)
        for place in sums:
            builder.store(ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES), place)
        with code.loop(stop, 1) as j:
            weight = builder.gep(weight_row, [builder.mul(j, w_stride)])
            columns = [code.load(weight, lane) for lane in lanes]
            for i, row in enumerate(low_rows):
                factor = code.spread(builder.load(builder.gep(row, [j])))
                for c, column in enumerate(columns):
                    place = sums[i * wide + c]
                    builder.store(code.multiply_add(factor, column, builder.load(place)), place)
        for i, row in enumerate(out_rows):
            for c, lane in enumerate(lanes):
                code.store(builder.fadd(code.load(row, lane), builder.load(sums[i * wide + c])), row, lane)
        return context.get_dummy_value()

    return signature, codegen
