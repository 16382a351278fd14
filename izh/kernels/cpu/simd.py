"""Register tiles of float32 written as LLVM vector code, for the loops whose speed is the model's speed.

Owns: `VectorCode`, `dot_tile_ahead` (many rows against many keys, fetching what comes next), `fetch_lines`, `fetch_at`,
`value_at` and `accumulate_tile` (weighted sum of rows).
Must not know: attention, paging.
Invariant: the order of arithmetic of one result depends only on the width of a row, never on how many rows or keys
share the tile. That makes a sequence's numbers independent of its neighbours; a plain loop leaves it to the optimizer.

A vector of LANES is one register where there are AVX2 or AVX-512, two on NEON.
Arrays are one-dimensional and contiguous; `*_at` is an offset in elements, `*_stride` the distance between rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir
import numba
from llvmlite.binding import get_host_cpu_name
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic


def lanes_of(features: str) -> int:
    """Floats of the widest register that numba compiles for, from its list of the processor's features."""
    return 16 if {"+avx512f", "+avx512vl"} <= set(features.split(",")) else 8


def widens_half(features: str) -> bool:
    """Whether the processor turns float16 into float32 itself: without, there is no code for it."""
    return not {"+f16c", "+neon"}.isdisjoint(features.split(","))


_SET = numba.config.CPU_FEATURES  # NUMBA_CPU_FEATURES, which may leave features of this machine out
FEATURES = get_host_cpu_features() if _SET is None else _SET
LANES = lanes_of(FEATURES)
HAS_HALF = widens_half(FEATURES)
LINE_BYTES = 64  # of a cache line
LINE = LINE_BYTES // 4  # floats of one
ASKED = 4  # times for a cache line of a page: while too many are on their way the processor drops requests
# Into which caches: all but the first, which holds what is being computed with and has few places for lines under way.
# Into all, a Zen 4 loses half of them (steps of 8 rows 1.46x as long, attention of 32 x 1024 keys 1.8x; held to AVX2
# 1.36x and 1.9x). A Zen 5 loses those that are for the second alone.
_ASK_FOR = 3 if get_host_cpu_name() == "znver5" else 2
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_BITS16 = ir.IntType(16)
_INT32 = ir.IntType(32)


class VectorCode:
    """The instructions both tiles are made of, at one place in a function."""

    def __init__(self, context: Any, builder: ir.IRBuilder) -> None:
        self.context = context
        self.builder = builder

    def row(self, array_type: Any, array: ir.Value, at: ir.Value, stride: ir.Value, index: int) -> ir.Value:
        """Pointer to element `at + index * stride`."""
        offset = self.builder.add(at, self.builder.mul(stride, stride.type(index)))
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        return self.builder.gep(data, [offset])

    def load(self, row: ir.Value, at: ir.Value) -> ir.Value:
        """LANES floats. Rows of 16-bit integers hold the bits of float16, which is widened: exactly."""
        pointer = self.builder.gep(row, [at])
        if pointer.type.pointee == _BITS16:
            return self._widened(pointer, ir.VectorType(ir.HalfType(), LANES), _VECTOR)
        return self.builder.load(self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def load_one(self, row: ir.Value, at: ir.Value) -> ir.Value:
        """One float, as `load`."""
        pointer = self.builder.gep(row, [at])
        if pointer.type.pointee == _BITS16:
            return self._widened(pointer, ir.HalfType(), _FLOAT)
        return self.builder.load(pointer)

    def _widened(self, pointer: ir.Value, narrow: ir.Type, wide: ir.Type) -> ir.Value:
        if not HAS_HALF:  # never called there, but compiled with what is
            return ir.Constant(wide, ir.Undefined)
        half = self.builder.load(self.builder.bitcast(pointer, narrow.as_pointer()), align=2)
        return self.builder.fpext(half, wide)

    def store(self, value: ir.Value, row: ir.Value, at: ir.Value) -> None:
        pointer = self.builder.gep(row, [at])
        self.builder.store(value, self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def fetch(self, row: ir.Value, at: ir.Value) -> None:
        """Ask for the cache line of an element, which need not exist: this never faults and waits for nothing."""
        byte = ir.IntType(8).as_pointer()
        prefetch = self.builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        )
        pointer = self.builder.bitcast(self.builder.gep(row, [at]), byte)
        self.builder.call(prefetch, [pointer, _INT32(0), _INT32(_ASK_FOR), _INT32(1)])  # to read, data

    def spread(self, scalar: ir.Value) -> ir.Value:
        """The scalar in every lane."""
        first = self.builder.insert_element(
            ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _INT32(0)
        )
        return self.shuffle(first, first, [0] * LANES)

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Of vectors of one length, whatever it is."""
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(a.type, [a.type] * 3), f"llvm.fmuladd.v{a.type.count}f32"
        )
        return self.builder.call(function, [a, b, c])

    def fold_four(self, vectors: list[ir.Value], join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Four vectors -> one of four scalars, each the lanes of one vector joined: neighbours pairwise within each
        four, twice, then halves until four are left."""

        def neighbours(a: ir.Value, b: ir.Value) -> ir.Value:
            even = [at + 2 * i for four in range(0, LANES, 4) for at in (four, LANES + four) for i in (0, 1)]
            return join(self.shuffle(a, b, even), self.shuffle(a, b, [lane + 1 for lane in even]))

        a, b, c, d = vectors
        folded = neighbours(neighbours(a, b), neighbours(c, d))
        half = LANES // 2
        while half >= 4:
            low, high = (self.shuffle(folded, folded, list(range(at, at + half))) for at in (0, half))
            folded = join(low, high)
            half //= 2
        return folded

    def greater(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Lane by lane; b where a is no number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    @contextmanager
    def loop(self, stop: ir.Value, step: int) -> Iterator[ir.Value]:
        with cgutils.for_range_slice(self.builder, stop.type(0), stop, stop.type(step), inc=True) as (index, _):
            yield index

    def registers(self, count: int) -> list[ir.Value]:
        """Places that live in registers once the optimizer has run."""
        return [cgutils.alloca_once(self.builder, _VECTOR) for _ in range(count)]

    def dot(
        self,
        q_rows: list[ir.Value],
        k_rows: list[ir.Value],
        width: ir.Value,
        out_rows: list[ir.Value],
        ahead: tuple[ir.Value, ir.Value, int] | None = None,
        carried: tuple[ir.Value, ir.Value, ir.Value] | None = None,
    ) -> None:
        """Each of `out_rows` gets its row's products with the keys, a multiple of four, d ascending.

        With `ahead` (row, step, count) vector n of the width also fetches `count` cache lines from element n * step of
        it. With `carried` (row, is_first, is_last) this is a part of the width: the sums begin as that row holds them,
        vector by vector, unless it is the first, and are left there unless it is the last.
        """
        builder, count, num_keys = self.builder, len(q_rows), len(k_rows)
        sums = self.registers(count * num_keys)
        for place in sums:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), place)
        if carried is not None:
            with builder.if_then(builder.not_(carried[1])):
                for n, place in enumerate(sums):
                    builder.store(self.load(carried[0], width.type(n * LANES)), place)
        with self.loop(width, LANES) as d:
            q_now = [self.load(row, d) for row in q_rows]
            if ahead is not None:
                row, step, num_lines = ahead
                at = builder.mul(builder.sdiv(d, d.type(LANES)), step)
                for line in range(num_lines):
                    self.fetch(row, builder.add(at, at.type(line * LINE)))
            for j, key in enumerate(k_rows):
                k_now = self.load(key, d)
                for i in range(count):
                    place = sums[i * num_keys + j]
                    builder.store(self.multiply_add(q_now[i], k_now, builder.load(place)), place)
        if carried is None:
            self._fold_into(out_rows, sums, width)
            return
        with builder.if_else(carried[2]) as (then, otherwise):
            with then:
                self._fold_into(out_rows, sums, width)
            with otherwise:
                for n, place in enumerate(sums):
                    self.store(builder.load(place), carried[0], width.type(n * LANES))

    def _fold_into(self, out_rows: list[ir.Value], sums: list[ir.Value], width: ir.Value) -> None:
        builder, num_keys = self.builder, len(sums) // len(out_rows)
        for i, row in enumerate(out_rows):
            for j in range(0, num_keys, 4):
                at = i * num_keys + j
                four = self.fold_four([builder.load(place) for place in sums[at : at + 4]], builder.fadd)
                to = builder.gep(row, [width.type(j)])
                builder.store(four, builder.bitcast(to, four.type.as_pointer()), align=4)


@intrinsic(prefer_literal=True)
def dot_tile_ahead(
    typing_context: Any,
    rows: Any,
    rows_at: Any,
    rows_stride: Any,
    keys: Any,
    keys_at: Any,
    keys_stride: Any,
    width: Any,
    is_first: Any,
    is_last: Any,
    carried: Any,
    carried_at: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    ahead_at: Any,
    ahead_step: Any,
    num_rows: Any,
    num_keys: Any,
    num_lines: Any,
) -> Any:
    """out[out_at + i * out_stride + j] = sum over d < width of rows[i, d] * keys[j, d], for i < num_rows and
    j < num_keys, 4 or 8.

    A width may be taken in parts, one after the other: all but the last leave their sums, num_rows x num_keys vectors,
    in `carried` for the next, and the bits are those of the whole. `width` is a multiple of LANES; three rows by four
    keys is what 16 vector registers hold, by eight what 32 do. Meanwhile fetches `num_lines` cache lines of the keys
    from `ahead_at + n * ahead_step` on for each vector n of the width. They may lie beyond the end. The three numbers
    are literals.
    """
    at = types.intp
    signature = types.void(
        rows, at, at, keys, at, at, at, types.boolean, types.boolean, carried, at, out, at, at, at, at, num_rows,
        num_keys, num_lines,
    )  # fmt: skip

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        q, q_at, q_stride, k, k_at, k_stride, stop, first, last, c, c_at, o, o_at, o_stride, a_at, a_step = args[:16]
        code = VectorCode(context, builder)
        q_rows = [code.row(rows, q, q_at, q_stride, i) for i in range(num_rows.literal_value)]
        k_rows = [code.row(keys, k, k_at, k_stride, j) for j in range(num_keys.literal_value)]
        o_rows = [code.row(out, o, o_at, o_stride, i) for i in range(len(q_rows))]
        code.dot(
            q_rows, k_rows, stop, o_rows, (code.row(keys, k, a_at, k_stride, 0), a_step, num_lines.literal_value),
            (code.row(carried, c, c_at, c_at, 0), first, last),
        )  # fmt: skip
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def fetch_lines(typing_context: Any, array: Any, at: Any, num_lines: Any) -> Any:
    """Ask for `num_lines`, a literal, cache lines from array[at] on, which need not exist."""
    signature = types.void(array, types.intp, num_lines)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        code = VectorCode(context, builder)
        data, line = context.make_array(array)(context, builder, args[0]).data, 8 * LINE_BYTES // array.dtype.bitwidth
        for n in range(num_lines.literal_value):
            code.fetch(data, builder.add(args[1], args[1].type(n * line)))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def fetch_at(typing_context: Any, address: Any, num_lines: Any) -> Any:
    """`fetch_lines` by address."""
    signature = types.void(types.intp, num_lines)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        code, row = VectorCode(context, builder), builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        for n in range(num_lines.literal_value):
            code.fetch(row, args[0].type(n * LINE_BYTES))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def value_at(typing_context: Any, array: Any, at: Any) -> Any:
    """array[at] as float32, where 16-bit integers hold the bits of float16."""
    signature = types.float32(array, types.intp)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        code = VectorCode(context, builder)
        return code.load_one(context.make_array(array)(context, builder, args[0]).data, args[1])

    return signature, codegen


@intrinsic(prefer_literal=True)
def accumulate_tile(
    typing_context: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    values: Any,
    values_at: Any,
    values_stride: Any,
    num_values: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    factors: Any,
    factors_at: Any,
    later: Any,
    later_at: Any,
    num_rows: Any,
    num_vectors: Any,
) -> Any:
    """out[i, :w] = factors[i] * out[i, :w] + sum over n < num_values of weights[i, n] * values[n, :w], n ascending;
    w = num_vectors * LANES. Where `factors_at` is negative the sum alone, whatever was there before. Unless `later` is
    None, fetches meanwhile what lies in `later` from `later_at` on as the values do here, asking ASKED times.

    `num_rows` and `num_vectors` are literals; their product is what stays in registers: at most 12 of 16, 24 of 32.
    """
    at = types.intp
    signature = types.void(
        weights, at, at, values, at, at, at, out, at, at, factors, at, later, at, num_rows, num_vectors
    )

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        p, p_at, p_stride, v, v_at, v_stride, stop, o, o_at, o_stride, f, f_at, following, following_at, _, _ = args
        code = VectorCode(context, builder)
        count, wide = num_rows.literal_value, num_vectors.literal_value
        p_rows = [code.row(weights, p, p_at, p_stride, i) for i in range(count)]
        o_rows = [code.row(out, o, o_at, o_stride, i) for i in range(count)]
        v_row = code.row(values, v, v_at, v_stride, 0)
        lanes = [stop.type(c * LANES) for c in range(wide)]
        sums = code.registers(count * wide)
        with builder.if_else(builder.icmp_signed("<", f_at, f_at.type(0))) as (then, otherwise):
            with then:
                for place in sums:
                    builder.store(ir.Constant(_VECTOR, [0.0] * LANES), place)
            with otherwise:
                factor_row = code.row(factors, f, f_at, stop, 0)
                for i in range(count):
                    factor = code.spread(code.load_one(factor_row, stop.type(i)))
                    for c in range(wide):
                        builder.store(builder.fmul(code.load(o_rows[i], lanes[c]), factor), sums[i * wide + c])
        with code.loop(stop, 1) as n:
            value = builder.gep(v_row, [builder.mul(n, v_stride)])
            if not isinstance(later, types.NoneType):
                ahead = code.row(later, following, following_at, stop, 0)
                first = builder.mul(builder.and_(n, n.type(ASKED - 1)), n.type(ASKED))
                first = builder.add(first, builder.and_(n, n.type(-ASKED * ASKED)))
                for i in range(ASKED):
                    row = builder.gep(ahead, [builder.mul(builder.add(first, n.type(i)), v_stride)])
                    for at in range(0, wide * LANES, LINE):
                        code.fetch(row, n.type(at))
            # The weights and one value at a time: of 16 registers 12 sums leave four.
            p_now = [code.spread(builder.load(builder.gep(row, [n]))) for row in p_rows]
            for c in range(wide):
                v_now = code.load(value, lanes[c])
                for i in range(count):
                    place = sums[i * wide + c]
                    builder.store(code.multiply_add(p_now[i], v_now, builder.load(place)), place)
        for i in range(count):
            for c in range(wide):
                code.store(builder.load(sums[i * wide + c]), o_rows[i], lanes[c])
        return context.get_dummy_value()

    return signature, codegen
