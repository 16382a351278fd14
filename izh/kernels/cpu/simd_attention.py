"""What attention does with vectors beside products, written as LLVM vector code.

Owns: `aligned_room`, `in_vectors`, `copy`, `transpose_tile`, `score_tile`, `softmax_tile`, ROWS.
Must not know: paging, which row sees which key.
Invariant: a score is one sum over the width, ascending, as `accumulate_tile` makes it; a row's sum of weights is the
same to the last bit wherever the columns begin and end around the keys that it sees.

Arrays as in `simd.py`: one-dimensional, `*_at` an offset in elements, `*_stride` the distance between rows.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.exp2 import exp2_lanes
from izh.kernels.cpu.simd import ASKED, LANES, LINE, LINE_BYTES, VectorCode

ROWS = 4  # that a softmax takes at once: while one waits for a sum across a vector, others go on
_MASKED = -2e38  # a score far below every real one


@kernel()
def aligned_room(count: int) -> Any:
    """`count` floats, uninitialised, that begin a cache line: a vector that straddles two takes twice as long."""
    room = np.empty(count + LINE, np.float32)
    skip = (LINE_BYTES - room.ctypes.data % LINE_BYTES) // 4 % LINE
    return room[skip : skip + count]


@kernel()
def in_vectors(count: int) -> int:
    """The least number of floats that fill whole vectors and hold `count`."""
    return (count + LANES - 1) // LANES * LANES


@kernel(inline=True)
def copy(source: Any, at: int, count: int, factor: Any, to: Any, to_at: int) -> None:
    """Of `count` floats, times `factor`."""
    values, target = source[at : at + count], to[to_at : to_at + count]
    for i in range(values.size):
        target[i] = values[i] * factor


def _transposed(code: VectorCode, rows: list[ir.Value]) -> list[ir.Value]:
    """LANES vectors -> LANES vectors: blocks of one lane, two lanes, ... change places across the diagonal."""
    now, half = list(rows), 1
    while half < LANES:
        low = [LANES + lane - half if lane & half else lane for lane in range(LANES)]
        high = [LANES + lane if lane & half else lane + half for lane in range(LANES)]
        for i in range(LANES):
            if not i & half:
                a, b = now[i], now[i + half]
                now[i], now[i + half] = code.shuffle(a, b, low), code.shuffle(a, b, high)
        half *= 2
    return now


@intrinsic
def transpose_tile(
    typing_context: Any, rows: Any, rows_at: Any, rows_stride: Any, out: Any, out_at: Any, out_stride: Any
) -> Any:
    """out[j, i] = rows[i, j] for i, j < LANES."""
    at = types.intp
    signature = types.void(rows, at, at, out, at, at)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        r, r_at, r_stride, o, o_at, o_stride = args
        code, zero = VectorCode(context, builder), r_at.type(0)
        now = [code.load(code.row(rows, r, r_at, r_stride, i), zero) for i in range(LANES)]
        for j, column in enumerate(_transposed(code, now)):
            code.store(column, code.row(out, o, o_at, o_stride, j), zero)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def score_tile(
    typing_context: Any, queries: Any, queries_at: Any, keys: Any, keys_at: Any, width: Any, out: Any, out_at: Any,
    out_stride: Any, later: Any, later_at: Any, num_rows: Any,
) -> Any:  # fmt: skip
    """out[i, j] = sum over d < width, ascending, of queries[i, d] * keys[j, d], i < num_rows (a literal) and j < LANES.

    `width` is a multiple of LANES and the distance of rows and of keys. The keys are turned over in registers: for few
    rows that is less work than a copy, and leaves the cache to what comes. Fetches meanwhile what lies in `later` from
    `later_at` on as the keys do here, asking ASKED times.
    """
    at = types.intp
    signature = types.void(queries, at, keys, at, at, out, at, at, later, at, num_rows)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        q, q_at, k, k_at, stop, o, o_at, o_stride, following, following_at, _ = args
        code, count = VectorCode(context, builder), num_rows.literal_value
        q_rows = [code.row(queries, q, q_at, stop, i) for i in range(count)]
        k_rows = [code.row(keys, k, k_at, stop, j) for j in range(LANES)]
        ahead = code.row(later, following, following_at, stop, 0)
        sums = code.registers(count)
        for place in sums:
            builder.store(ir.Constant(place.type.pointee, [0.0] * LANES), place)
        with code.loop(stop, LANES) as d:
            first = builder.mul(builder.and_(d, d.type(-ASKED * LANES)), d.type(LANES))
            for line in range(0, ASKED * LANES * LANES, LINE):
                code.fetch(ahead, builder.add(first, d.type(line)))
            for n, column in enumerate(_transposed(code, [code.load(row, d) for row in k_rows])):
                for place, row in zip(sums, q_rows, strict=True):
                    weight = code.spread(code.load_one(row, builder.add(d, d.type(n))))
                    builder.store(code.multiply_add(weight, column, builder.load(place)), place)
        for i, place in enumerate(sums):
            code.store(builder.load(place), code.row(out, o, o_at, o_stride, i), stop.type(0))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def softmax_tile(
    typing_context: Any, scores: Any, at: Any, stride: Any, start: Any, stop: Any, row: Any, lows: Any, highs: Any,
    maxima: Any, totals: Any, factors: Any,
) -> Any:  # fmt: skip
    """Turn ROWS rows of scores into weights 2^(score - new maximum) in the columns [low, high) that each row sees, and
    into 0 in all others of [start, stop).

    Row i of the tile has entry row + i of the arrays. Leaves there the new maximum, by what factor weights to the old
    one shrink, and the total: what it was, times that, and the sum of the new weights. `start` and `stop` are multiples
    of LANES; columns count from `at`.
    """
    index = types.intp
    signature = types.void(scores, index, index, index, index, index, lows, highs, maxima, totals, factors)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        s, s_at, s_stride, first, end, at_row, *arrays = args
        code, nothing = VectorCode(context, builder), first.type(0)
        rows = [code.row(scores, s, s_at, s_stride, i) for i in range(ROWS)]
        low_row, high_row, *places = (
            code.row(kind, array, at_row, nothing, 0) for kind, array in zip(signature.args[6:], arrays, strict=True)
        )
        four, vector = ir.VectorType(ir.FloatType(), ROWS), ir.VectorType(ir.FloatType(), LANES)
        maximum_at, total_at, factor_at = (builder.bitcast(place, four.as_pointer()) for place in places)
        zero, masked = ir.Constant(vector, [0.0] * LANES), ir.Constant(vector, [_MASKED] * LANES)
        old = builder.load(maximum_at, align=4)
        lows_now, highs_now = (
            [builder.load(builder.gep(array, [first.type(i)])) for i in range(ROWS)] for array in (low_row, high_row)
        )

        def walk(sees: Callable[[int, ir.Value, ir.Value, ir.Value], ir.Value]) -> None:
            """`sees` (row, column, vector, other) keeps what the row sees of the vector, elsewhere has the other."""
            tops, sums = code.registers(ROWS), code.registers(ROWS)
            for top, total in zip(tops, sums, strict=True):
                builder.store(masked, top)
                builder.store(zero, total)
            with cgutils.for_range_slice(builder, first, end, first.type(LANES), inc=True) as (column, _):
                for i, top in enumerate(tops):
                    seen = sees(i, column, code.load(rows[i], column), masked)
                    builder.store(code.greater(seen, builder.load(top)), top)
            new = code.greater(code.fold_four([builder.load(top) for top in tops], code.greater), old)
            peaks = [code.shuffle(new, new, [i] * LANES) for i in range(ROWS)]
            with cgutils.for_range_slice(builder, first, end, first.type(LANES), inc=True) as (column, _):
                for i, total in enumerate(sums):
                    weight = exp2_lanes(code, builder.fsub(code.load(rows[i], column), peaks[i]))
                    weight = sees(i, column, weight, zero)
                    code.store(weight, rows[i], column)
                    builder.store(builder.fadd(builder.load(total), weight), total)
            shrunk = exp2_lanes(code, builder.fsub(old, new))
            added = code.fold_four([builder.load(total) for total in sums], builder.fadd)
            total = builder.fadd(builder.fmul(builder.load(total_at, align=4), shrunk), added)
            for value, place in ((new, maximum_at), (total, total_at), (shrunk, factor_at)):
                builder.store(value, place, align=4)

        all_seen = ir.Constant(ir.IntType(1), 1)
        for low, high in zip(lows_now, highs_now, strict=True):
            all_seen = builder.and_(all_seen, builder.icmp_signed("<=", low, first))
            all_seen = builder.and_(all_seen, builder.icmp_signed(">=", high, end))
        with builder.if_else(all_seen, likely=True) as (then, otherwise):
            with then:
                walk(lambda _row, _column, value, _other: value)
            with otherwise:
                lane = ir.IntType(32)
                lanes = ir.Constant(ir.VectorType(lane, LANES), list(range(LANES)))

                def sees(i: int, column: ir.Value, value: ir.Value, other: ir.Value) -> ir.Value:
                    low, high = lows_now[i], highs_now[i]
                    many = code.spread(builder.trunc(builder.sub(high, low), lane))
                    past = builder.add(lanes, code.spread(builder.trunc(builder.sub(column, low), lane)))
                    return builder.select(builder.icmp_unsigned("<", past, many), value, other)

                walk(sees)
        return context.get_dummy_value()

    return signature, codegen
