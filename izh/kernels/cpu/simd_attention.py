"""What attention does with vectors beside products, written as LLVM vector code.

Owns: `aligned_room`, `in_vectors`, `copy`, `transpose_tile`, `score_tile`, `softmax_row`.
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
from izh.kernels.cpu.simd import LANES, LINE, LINE_BYTES, VectorCode

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


@kernel()
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
    out_stride: Any, later: Any, num_rows: Any,
) -> Any:  # fmt: skip
    """out[i, j] = sum over d < width, ascending, of queries[i, d] * keys[j, d], i < num_rows (a literal) and j < LANES.

    `width` is a multiple of LANES and the distance of rows and of keys. The keys are turned over in registers: for few
    rows that is less work than a copy, and leaves the cache to what comes. Fetches meanwhile what of `later` lies where
    the keys lie.
    """
    at = types.intp
    signature = types.void(queries, at, keys, at, at, out, at, at, later, num_rows)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        q, q_at, k, k_at, stop, o, o_at, o_stride, following, _ = args
        code, count = VectorCode(context, builder), num_rows.literal_value
        q_rows = [code.row(queries, q, q_at, stop, i) for i in range(count)]
        k_rows = [code.row(keys, k, k_at, stop, j) for j in range(LANES)]
        ahead = code.row(later, following, k_at, stop, 0)
        sums = code.registers(count)
        for place in sums:
            builder.store(ir.Constant(place.type.pointee, [0.0] * LANES), place)
        with code.loop(stop, LANES) as d:
            for line in range(0, LANES * LANES, LINE):
                code.fetch(ahead, builder.add(builder.mul(d, d.type(LANES)), d.type(line)))
            for n, column in enumerate(_transposed(code, [code.load(row, d) for row in k_rows])):
                for place, row in zip(sums, q_rows, strict=True):
                    weight = code.spread(code.load_one(row, builder.add(d, d.type(n))))
                    builder.store(code.multiply_add(weight, column, builder.load(place)), place)
        for i, place in enumerate(sums):
            code.store(builder.load(place), code.row(out, o, o_at, o_stride, i), stop.type(0))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def softmax_row(
    typing_context: Any, scores: Any, at: Any, start: Any, stop: Any, low: Any, high: Any, maximum: Any
) -> Any:
    """Turn the scores of columns [low, high) into weights 2^(score - new maximum), all others in [start, stop) into 0.

    Returns (new maximum, sum of the weights). `start` and `stop` are multiples of LANES; columns count from `at`.
    """
    index = types.intp
    result = types.UniTuple(types.float32, 2)
    signature = result(scores, index, index, index, index, index, types.float32)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        s, begin, first, end, seen_from, seen_to, before = args
        code = VectorCode(context, builder)
        row = code.row(scores, s, begin, begin.type(0), 0)
        vector = ir.VectorType(ir.FloatType(), LANES)
        zero, masked = ir.Constant(vector, [0.0] * LANES), ir.Constant(vector, [_MASKED] * LANES)
        outcome = [cgutils.alloca_once(builder, ir.FloatType()) for _ in range(2)]

        def walk(sees: Callable[[ir.Value, ir.Value, ir.Value], ir.Value]) -> None:
            """`sees` (column, vector, other) keeps of the vector what is seen, and has the other elsewhere."""
            top, total = code.registers(2)
            builder.store(code.spread(before), top)
            builder.store(zero, total)
            with cgutils.for_range_slice(builder, first, end, first.type(LANES), inc=True) as (column, _):
                builder.store(code.greater(sees(column, code.load(row, column), masked), builder.load(top)), top)
            maximum = code.fold_lanes(builder.load(top), code.greater)
            builder.store(maximum, outcome[0])
            peak = code.spread(maximum)
            with cgutils.for_range_slice(builder, first, end, first.type(LANES), inc=True) as (column, _):
                weight = exp2_lanes(code, builder.fsub(code.load(row, column), peak))
                weight = sees(column, weight, zero)
                code.store(weight, row, column)
                builder.store(builder.fadd(builder.load(total), weight), total)
            builder.store(code.fold_lanes(builder.load(total), builder.fadd), outcome[1])

        all_seen = builder.and_(builder.icmp_signed("<=", seen_from, first), builder.icmp_signed(">=", seen_to, end))
        with builder.if_else(all_seen, likely=True) as (then, otherwise):
            with then:
                walk(lambda _column, value, _other: value)
            with otherwise:
                lane = ir.IntType(32)
                lanes = ir.Constant(ir.VectorType(lane, LANES), list(range(LANES)))
                many = code.spread(builder.trunc(builder.sub(seen_to, seen_from), lane))

                def sees(column: ir.Value, value: ir.Value, other: ir.Value) -> ir.Value:
                    past = builder.add(lanes, code.spread(builder.trunc(builder.sub(column, seen_from), lane)))
                    return builder.select(builder.icmp_unsigned("<", past, many), value, other)

                walk(sees)
        return context.make_tuple(builder, signature.return_type, [builder.load(place) for place in outcome])

    return signature, codegen
