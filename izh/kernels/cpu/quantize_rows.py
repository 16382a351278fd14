"""Activations as whole numbers of 8 bits, on CPU.

Owns: `quantize_rows`.
Must not know: weights, threads.
Invariant: the numbers are those of `quantize_activations` in `izh/kernels/quantized.py`, to the last bit; only codes of
a group that is not finite may be any, as its scale is not a number.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.simd_integer import CODE, LANES, spread
from izh.kernels.quantized import GROUP, LEAST, TOP

_FLOAT, _INT32 = ir.FloatType(), ir.IntType(32)
_FLOATS, _WHOLE = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)
_CODES = ir.VectorType(ir.IntType(8 * np.dtype(CODE).itemsize), LANES)
_ROUND = 1.5 * 2**23
"""Added to a small number it leaves it rounded to a whole one, ties to even, in the lowest bits."""
_ROUND_BITS = int(np.float32(_ROUND).view(np.int32))


def _all(kind: ir.VectorType, value: float | int) -> ir.Value:
    return ir.Constant(kind, [value] * LANES)


@intrinsic
def _quantize_group(
    typing_context: Any,
    x: Any,
    at: Any,
    codes: Any,
    scales: Any,
    sums: Any,
    group: Any,
    times: Any,
    rest: Any,
) -> Any:
    """x[at : at + GROUP] -> a group's codes, their scale, `times` their sum, and what they leave, in `rest` [GROUP].
    That may be x."""
    index = types.intp
    signature = types.void(x, index, codes, scales, sums, index, types.int32, rest)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _, x_at, _, _, _, g, factor_of_sum, _ = args
        to = builder.mul(g, g.type(GROUP))

        def place(argument: int, offset: ir.Value, more: int = 0) -> ir.Value:
            data = context.make_array(signature.args[argument])(context, builder, args[argument]).data
            return builder.gep(data, [builder.add(offset, offset.type(more))])

        def reduced(name: str, vector: ir.Value, *start: ir.Value, flags: tuple[str, ...] = ()) -> ir.Value:
            kind = ir.FunctionType(vector.type.element, [each.type for each in (*start, vector)])
            suffix = f"v{LANES}{'f32' if vector.type.element == _FLOAT else f'i{vector.type.element.width}'}"
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.{suffix}")
            return builder.call(function, [*start, vector], fastmath=flags)

        values = [
            builder.load(builder.bitcast(place(0, x_at, start), _FLOATS.as_pointer()), align=4)
            for start in range(0, GROUP, LANES)
        ]
        sizes = [
            builder.bitcast(builder.and_(builder.bitcast(each, _WHOLE), _all(_WHOLE, 2**31 - 1)), _FLOATS)
            for each in values
        ]
        largest, unordered = sizes[0], builder.fcmp_unordered("uno", values[0], values[0])
        for value, size in zip(values[1:], sizes[1:], strict=True):
            largest = builder.select(builder.fcmp_ordered(">", size, largest), size, largest)
            unordered = builder.or_(unordered, builder.fcmp_unordered("uno", value, value))
        top = reduced("fmax", largest, flags=("nnan",))
        finite = builder.and_(
            builder.not_(reduced("or", unordered)), builder.fcmp_ordered("<", top, _FLOAT(float("inf")))
        )
        top = builder.select(builder.fcmp_ordered(">", top, _FLOAT(np.float32(LEAST))), top, _FLOAT(np.float32(LEAST)))
        factor = spread(builder, builder.fdiv(_FLOAT(TOP), top))
        scale = builder.select(finite, builder.fmul(top, _FLOAT(np.float32(1 / TOP))), _FLOAT(float("nan")))
        scale_of_each = spread(builder, scale)
        total = _all(_WHOLE, 0)
        for start, value in zip(range(0, GROUP, LANES), values, strict=True):
            rounded = builder.fadd(builder.fmul(value, factor), _all(_FLOATS, _ROUND))
            whole = builder.sub(builder.bitcast(rounded, _WHOLE), _all(_WHOLE, _ROUND_BITS))
            total = builder.add(total, whole)
            where = builder.bitcast(place(2, to, start), _CODES.as_pointer())
            builder.store(builder.trunc(whole, _CODES), where, align=1)
            left = builder.fsub(value, builder.fmul(scale_of_each, builder.fsub(rounded, _all(_FLOATS, _ROUND))))
            where = builder.bitcast(place(7, g.type(start)), _FLOATS.as_pointer())
            builder.store(left, where, align=4)
        builder.store(scale, place(3, g))
        builder.store(builder.mul(reduced("add", total), factor_of_sum), place(4, g))
        return context.get_dummy_value()

    return signature, codegen


@kernel()
def quantize_rows(
    start: int, stop: int, x: Any, x_row: int, width: int, groups: int, times: int, digits: int, rows: int, codes: Any,
    scales: Any, sums: Any,
) -> None:  # fmt: skip
    """Rows start .. stop - 1 of `rows`, `width` floats each, x_row apart -> `codes` [digits, rows, groups * GROUP]
    CODE, filled up with zeros, and of each group its scale and `times` the sum of its codes, [digits, rows, groups]
    float32 and int32."""
    last, rest = np.zeros(GROUP, np.float32), np.empty(GROUP, np.float32)
    whole = width // GROUP
    num_last = width - whole * GROUP
    for i in range(start, stop):
        at, group = i * x_row, i * groups
        for g in range(groups):
            if g < whole:
                _quantize_group(x, at + g * GROUP, codes, scales, sums, group + g, np.int32(times), rest)
            else:
                last[:num_last] = x[at + whole * GROUP : at + width]
                _quantize_group(last, 0, codes, scales, sums, group + g, np.int32(times), rest)
            if digits == 2:
                second = (rows + i) * groups + g
                _quantize_group(rest, 0, codes, scales, sums, second, np.int32(times), rest)
