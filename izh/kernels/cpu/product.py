"""Products of two small matrices in flat scratch arrays, in place of a third or added to it.

Owns: `add_product`, ANEW. Must not know: what is multiplied.
Invariant: the order of arithmetic of one result does not depend on how many rows or columns there are.
"""

from typing import Any

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.simd import LANES, accumulate_tile

ANEW = -1  # in place of where factors lie: nothing was summed before
_MANY = 6 if LANES == 16 else 3  # rows of a tile with four vectors each: AVX-512 has 32 registers, AVX2 16


@kernel(inline=True)
def add_product(
    a: Any, a_at: int, a_row: int, num: int, b: Any, b_at: int, b_row: int, inner: int, out: Any, out_at: int,
    out_row: int, columns: int, factors: Any, factors_at: int, later: Any, later_at: int,
) -> None:  # fmt: skip
    """out[i, c] = factors[i] * out[i, c] + sum over n < inner of a[i, n] * b[n, c], n ascending; the sum alone where
    `factors_at` is ANEW. `columns` is a multiple of LANES. `later`, if not None: see `accumulate_tile`."""
    c = 0
    while c < columns:
        wide = 4 if columns - c >= 4 * LANES else (2 if columns - c >= 2 * LANES else 1)
        i = 0
        while i < num:
            p, v, o = a_at + i * a_row, b_at + c, out_at + i * out_row + c
            f, e = factors_at + i if factors_at >= 0 else factors_at, later_at + c
            if num - i >= _MANY:
                if wide == 4:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, _MANY, 4)
                elif wide == 2:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, _MANY, 2)
                else:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, _MANY, 1)
                i += _MANY
            elif num - i >= 3:
                if wide == 4:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, 3, 4)
                elif wide == 2:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, 3, 2)
                else:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, 3, 1)
                i += 3
            else:
                if wide == 4:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, 1, 4)
                elif wide == 2:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, 1, 2)
                else:
                    accumulate_tile(a, p, a_row, b, v, b_row, inner, out, o, out_row, factors, f, later, e, 1, 1)
                i += 1
        c += wide * LANES
