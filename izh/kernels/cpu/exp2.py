"""2^x in float32: for loops, in a form that the optimizer turns into vector code (a call to a mathematical library
would not be), and for kernels that are written as vectors.

Owns: `exp2`, `exp2_lanes`. Must not know: who needs it.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.simd import VectorCode

# 2^f = 1 + f c1 + ... + f^6 c6 for |f| <= 1/2, of the least relative error: 2e-9, before the rounding of float32.
_COEFFICIENTS = (1.0, 0.6931471825, 0.2402264774, 0.0555033237, 0.0096184369, 0.0013398875, 0.0001535336)
_SERIES = tuple(np.float32(c) for c in _COEFFICIENTS)
_LOWEST, _HIGHEST = np.float32(-127.0), np.float32(127.0)
_ZERO_BELOW, _ZERO = np.float32(-126.0), np.float32(0.0)
_SHIFT, _SHIFT_BACK = np.float32(128.5), np.int32(128)
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
_TO_WHOLE = 1.5 * 2.0**23  # what is added to it has no room for a fraction; its lowest bits are then the whole number


@kernel(fastmath={"contract"})
def exp2(x: Any) -> Any:
    """Exactly 1 at 0, exactly 0 below -126, at most 2^127; else off by about 1e-7 of the result.

    2^x = 2^whole * 2^f with |f| <= 1/2: the first is made of bits, the second a polynomial.
    """
    clamped = min(max(x, _LOWEST), _HIGHEST)
    whole = np.int32(np.int32(clamped + _SHIFT) - _SHIFT_BACK)  # to nearest: the conversion truncates a positive number
    f = clamped - np.float32(whole)
    c = _SERIES
    series = c[0] + f * (c[1] + f * (c[2] + f * (c[3] + f * (c[4] + f * (c[5] + f * c[6])))))
    power = np.int32(np.int32(whole + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)
    return series * power if clamped >= _ZERO_BELOW else _ZERO


def exp2_lanes(code: VectorCode, x: ir.Value) -> ir.Value:
    """2^x of a vector, of any length, of x <= 126, as `exp2`, but 2^-126 for all that is less, and for no number."""
    builder = code.builder

    def every(value: Any) -> ir.Value:
        return ir.Constant(x.type, [float(np.float32(value))] * x.type.count)

    clamped = code.greater(x, every(_ZERO_BELOW))
    shifted = builder.fadd(clamped, every(_TO_WHOLE))
    f = builder.fsub(clamped, builder.fsub(shifted, every(_TO_WHOLE)))
    series = every(_COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        series = code.multiply_add(series, f, every(coefficient))
    bits = ir.VectorType(ir.IntType(32), x.type.count)
    exponent = builder.shl(builder.bitcast(shifted, bits), ir.Constant(bits, [int(_MANTISSA_BITS)] * x.type.count))
    return builder.bitcast(builder.add(builder.bitcast(series, bits), exponent), x.type)
