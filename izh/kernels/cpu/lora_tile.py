"""Register tile of the expansion y = B low, on B as it lies: outputs in rows, ranks side by side.

Owns: `expand_tile`, which turns four ranks of eight outputs over in registers and uses them for all rows of the tile.
Must not know: adapters, threads.
Invariant: a result's sum runs over its ranks in ascending order, however many rows share the tile. Nothing beyond the
real rank is read: there lie leftovers of earlier adapters.
"""

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from izh.kernels.cpu.simd import LANES, VectorCode

RANKS = 4  # turned over at once: four quarter rows of two halves of the tile
_QUARTER = ir.VectorType(ir.FloatType(), RANKS)


def _columns(code: VectorCode, rows: list[ir.Value], at: ir.Value) -> list[ir.Value]:
    """rows[0..7][at .. at + 3] -> four vectors, the c-th holding element at + c of each row."""
    builder = code.builder

    def quarter(row: ir.Value) -> ir.Value:
        return builder.load(builder.bitcast(builder.gep(row, [at]), _QUARTER.as_pointer()), align=4)

    both = [code.shuffle(quarter(rows[i]), quarter(rows[i + RANKS]), list(range(LANES))) for i in range(RANKS)]
    low = [code.shuffle(both[i], both[i + 1], [0, 8, 1, 9, 4, 12, 5, 13]) for i in (0, 2)]
    high = [code.shuffle(both[i], both[i + 1], [2, 10, 3, 11, 6, 14, 7, 15]) for i in (0, 2)]
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    return [code.shuffle(pair[0], pair[1], lanes) for pair in (low, high) for lanes in (first, second)]


def _column(code: VectorCode, rows: list[ir.Value], at: ir.Value) -> ir.Value:
    """Element `at` of each of the eight rows."""
    builder = code.builder
    vector = ir.Constant(ir.VectorType(ir.FloatType(), LANES), ir.Undefined)
    for lane, row in enumerate(rows):
        vector = builder.insert_element(vector, builder.load(builder.gep(row, [at])), ir.IntType(32)(lane))
    return vector


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
    out_stride: Any,
    num_rows: Any,
) -> Any:
    """out[out_at + i * out_stride + e] = sum over j < rank of low[i, j] * weights[e, j], i < num_rows and e < LANES.

    `num_rows` is a literal, at most 4.
    """
    at = types.intp
    signature = types.void(low, at, at, weights, at, at, at, out, at, at, num_rows)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        lo, lo_at, lo_stride, w, w_at, w_stride, stop, o, o_at, o_stride, _ = args
        code = VectorCode(context, builder)
        count = num_rows.literal_value
        low_rows = [code.row(low, lo, lo_at, lo_stride, i) for i in range(count)]
        weight_rows = [code.row(weights, w, w_at, w_stride, e) for e in range(LANES)]
        sums = code.registers(count)
        zero = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)
        for place in sums:
            builder.store(zero, place)

        def add(column: ir.Value, rank_at: ir.Value) -> None:
            for row, place in zip(low_rows, sums, strict=True):
                factor = code.spread(builder.load(builder.gep(row, [rank_at])))
                builder.store(code.multiply_add(factor, column, builder.load(place)), place)

        whole = builder.and_(stop, stop.type(-RANKS))
        with code.loop(whole, RANKS) as j:
            for c, column in enumerate(_columns(code, weight_rows, j)):
                add(column, builder.add(j, j.type(c)))
        with code.loop(builder.sub(stop, whole), 1) as left:
            j = builder.add(whole, left)
            add(_column(code, weight_rows, j), j)
        for i, place in enumerate(sums):
            code.store(builder.load(place), code.row(out, o, o_at, o_stride, i), stop.type(0))
        return context.get_dummy_value()

    return signature, codegen
