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
_ROUND_BITS, _LEAST_BITS, _INFINITY_BITS = (int(np.float32(x).view(np.int32)) for x in (_ROUND, LEAST, np.inf))


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
    leaves: Any,
) -> Any:
    """x[at : at + GROUP] -> a group's codes, their scale, `times` their sum, and if `leaves` what they leave, in `rest`
    [GROUP]. That may be x."""
    index = types.intp
    signature = types.void(x, index, codes, scales, sums, index, types.int32, rest, types.boolean)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _, x_at, _, _, _, g, factor_of_sum, _, keeps_rest = args
        to = builder.mul(g, g.type(GROUP))

        def place(argument: int, offset: ir.Value, more: int = 0) -> ir.Value:
            data = context.make_array(signature.args[argument])(context, builder, args[argument]).data
            return builder.gep(data, [builder.add(offset, offset.type(more))])

        def reduced(name: str, vector: ir.Value) -> ir.Value:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_INT32, [_WHOLE]), f"llvm.vector.reduce.{name}.v{LANES}i32"
            )
            return builder.call(function, [vector])

        values = [
            builder.load(builder.bitcast(place(0, x_at, start), _FLOATS.as_pointer()), align=4)
            for start in range(0, GROUP, LANES)
        ]
        # Without signs, floats are in the order of their bits, infinity and what is no number above all others.
        sizes = [builder.and_(builder.bitcast(each, _WHOLE), _all(_WHOLE, 2**31 - 1)) for each in values]
        largest = sizes[0]
        for size in sizes[1:]:
            largest = builder.select(builder.icmp_signed(">", size, largest), size, largest)
        bits = reduced("smax", largest)
        finite = builder.icmp_signed("<", bits, _INT32(_INFINITY_BITS))
        bits = builder.select(builder.icmp_signed(">", bits, _INT32(_LEAST_BITS)), bits, _INT32(_LEAST_BITS))
        top = builder.bitcast(bits, _FLOAT)
        factor = spread(builder, builder.fdiv(_FLOAT(TOP), top))
        scale = builder.select(finite, builder.fmul(top, _FLOAT(np.float32(1 / TOP))), _FLOAT(float("nan")))
        scale_of_each = spread(builder, scale)
        total, rounded = _all(_WHOLE, 0), []
        for start, value in zip(range(0, GROUP, LANES), values, strict=True):
            rounded.append(builder.fadd(builder.fmul(value, factor), _all(_FLOATS, _ROUND)))
            whole = builder.sub(builder.bitcast(rounded[-1], _WHOLE), _all(_WHOLE, _ROUND_BITS))
            total = builder.add(total, whole)
            where = builder.bitcast(place(2, to, start), _CODES.as_pointer())
            builder.store(builder.trunc(whole, _CODES), where, align=1)
        builder.store(scale, place(3, g))
        builder.store(builder.mul(reduced("add", total), factor_of_sum), place(4, g))
        with builder.if_then(keeps_rest):
            for start, value, whole in zip(range(0, GROUP, LANES), values, rounded, strict=True):
                whole = builder.fsub(whole, _all(_FLOATS, _ROUND))
                where = builder.bitcast(place(7, g.type(start)), _FLOATS.as_pointer())
                builder.store(builder.fsub(value, builder.fmul(scale_of_each, whole)), where, align=4)
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
                _quantize_group(x, at + g * GROUP, codes, scales, sums, group + g, np.int32(times), rest, digits == 2)
            else:
                last[:num_last] = x[at + whole * GROUP : at + width]
                _quantize_group(last, 0, codes, scales, sums, group + g, np.int32(times), rest, digits == 2)
            if digits == 2:
                second = (rows + i) * groups + g
                _quantize_group(rest, 0, codes, scales, sums, second, np.int32(times), rest, False)
