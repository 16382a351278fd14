"""2^x in float32, in a form that the optimizer turns into vector code (a call to a mathematical library would not be).

Owns: `exp2`. Must not know: who needs it.
"""

import math
from typing import Any

import numpy as np

from izh.kernels.cpu.compile import kernel

_TAYLOR = tuple(np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(8))
_LOWEST, _HIGHEST = np.float32(-127.0), np.float32(127.0)
_ZERO_BELOW, _ZERO = np.float32(-126.0), np.float32(0.0)
_SHIFT, _SHIFT_BACK = np.float32(128.5), np.int32(128)
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)


@kernel(fastmath={"contract"})
def exp2(x: Any) -> Any:
    """Exactly 1 at 0, exactly 0 below -126, at most 2^127; else off by about 1e-7 of the result.

    2^x = 2^whole * 2^f with |f| <= 1/2: the first is made of bits, the second a Taylor series.
    """
    clamped = min(max(x, _LOWEST), _HIGHEST)
    whole = np.int32(np.int32(clamped + _SHIFT) - _SHIFT_BACK)  # to nearest: the conversion truncates a positive number
    f = clamped - np.float32(whole)
    c = _TAYLOR
    series = c[0] + f * (c[1] + f * (c[2] + f * (c[3] + f * (c[4] + f * (c[5] + f * (c[6] + f * c[7]))))))
    power = np.int32(np.int32(whole + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)
    return series * power if clamped >= _ZERO_BELOW else _ZERO
