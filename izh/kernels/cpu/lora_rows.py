"""The arithmetic of low-rank corrections on CPU: low = A x and y += B low, of whatever pieces they are cut into.

Owns: `shrink` and `expand`, and which tiles the rows of a group are taken in.
Must not know: threads, tensors, adapters' names. Rows lie grouped by slot as in `AdapterRows`.
Invariant: a row's numbers depend on that row and its adapter alone, whatever else is in the group and however columns
are cut (see `lora_plan.py`). Nothing beyond a slot's real rank is read.

Loops are in here and not around these: a call that is not inlined costs tens of nanoseconds, as each array goes over in
seven words.
"""

from typing import Any

import numpy as np

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.lora_plan import AT, FIRST, LOW, RANKS, STOP
from izh.kernels.cpu.lora_tile import expand_tile, shrink_tile
from izh.kernels.cpu.simd import LANES, value_at


@kernel()
def shrink(
    u: int, last: int, units: Any, x: Any, x_row: int, order: Any, a: Any, width: int, low: Any, low_row: int,
    low_first: int,
) -> None:  # fmt: skip
    """low of the ranks of units [u, last), for their rows; low begins with that of row `low_first`."""
    while u < last:
        first, stop, at, num, to = units[u, FIRST], units[u, STOP], units[u, AT], units[u, RANKS], units[u, LOW]
        to += (first - low_first) * low_row
        u += 1
        while num > 0:
            # A row alone takes eight ranks at once: four sums are too few to keep the multipliers busy.
            some = 8 if num == 8 and stop - first == 1 else min(num, 4)
            if some < 4:
                _shrink_singly(first, stop, some, x, x_row, order, a, at, width, low, to, low_row)
            else:
                _shrink_together(first, stop, some, x, x_row, order, a, at, width, low, to, low_row)
            num -= some
            at += some * width
            to += some


@kernel(inline=True)
def _shrink_together(
    k: int, stop: int, num: int, x: Any, x_row: int, order: Any, a: Any, at: int, width: int, low: Any, to: int,
    low_row: int,
) -> None:  # fmt: skip
    """low of four ranks, or, of one row, of eight."""
    whole = width - width % LANES
    while k < stop:
        first = order[k] * x_row
        left = stop - k
        count = 1 if left == 1 else 2 if left == 2 or left == 4 else 3
        if count == 3:
            ats = (first, order[k + 1] * x_row, order[k + 2] * x_row)
            shrink_tile(x, ats, a, at, width, whole, low, to, low_row, 4)
        elif count == 2:
            shrink_tile(x, (first, order[k + 1] * x_row), a, at, width, whole, low, to, low_row, 4)
        elif num == 8:
            shrink_tile(x, (first,), a, at, width, whole, low, to, low_row, 8)
        else:
            shrink_tile(x, (first,), a, at, width, whole, low, to, low_row, 4)
        for i in range(count):
            for j in range(num):
                for d in range(whole, width):
                    low[to + i * low_row + j] += x[order[k + i] * x_row + d] * value_at(a, at + j * width + d)
        k += count
        to += count * low_row


@kernel()
def _shrink_singly(
    k: int, stop: int, num: int, x: Any, x_row: int, order: Any, a: Any, at: int, width: int, low: Any, to: int,
    low_row: int,
) -> None:  # fmt: skip
    """low of one to three ranks, each taken as if it were four."""
    whole = width - width % LANES
    sums = np.empty(4, np.float32)
    for i in range(k, stop):
        for j in range(num):
            shrink_tile(x, (order[i] * x_row,), a, at + j * width, 0, whole, sums, 0, 4, 4)
            total = sums[0]
            for d in range(whole, width):
                total += x[order[i] * x_row + d] * value_at(a, at + j * width + d)
            low[to + (i - k) * low_row + j] = total


@kernel()
def expand(
    start: int, stop: int, part: int, low: Any, low_row: int, low_first: int, b: Any, b_row: int, max_rank: int,
    order: Any, starts: Any, slots: Any, ranks: Any, g: int, last: int, until: int, y: Any, y_row: int,
) -> None:  # fmt: skip
    """Corrects columns [start, stop) of one part, of the rows from `low_first` on and before `until` that are in groups
    [g, last)."""
    num = stop - start
    whole = num - num % LANES
    for group in range(g, last):
        rank = ranks[slots[group], part]
        if rank == 0:
            continue
        b_at = slots[group] * max_rank * b_row + start
        k, end = max(starts[group], low_first), min(starts[group + 1], until)
        while k < end:
            count = min(4, end - k)
            low_at = (k - low_first) * low_row + part * max_rank
            first = order[k] * y_row + start
            second = order[k + min(1, count - 1)] * y_row + start
            third = order[k + min(2, count - 1)] * y_row + start
            fourth = order[k + count - 1] * y_row + start
            d = 0
            while d < whole:
                if count == 4 and whole - d >= 2 * LANES:
                    ats = (first + d, second + d, third + d, fourth + d)
                    expand_tile(low, low_at, low_row, b, b_at + d, b_row, rank, y, ats, 2)
                    d += 2 * LANES
                elif count == 1 and whole - d >= 8 * LANES:
                    expand_tile(low, low_at, low_row, b, b_at + d, b_row, rank, y, (first + d,), 8)
                    d += 8 * LANES
                elif count < 4 and whole - d >= 4 * LANES:
                    if count == 3:
                        at3 = (first + d, second + d, third + d)
                        expand_tile(low, low_at, low_row, b, b_at + d, b_row, rank, y, at3, 4)
                    elif count == 2:
                        expand_tile(low, low_at, low_row, b, b_at + d, b_row, rank, y, (first + d, second + d), 4)
                    else:
                        expand_tile(low, low_at, low_row, b, b_at + d, b_row, rank, y, (first + d,), 4)
                    d += 4 * LANES
                else:
                    for i in range(count):
                        at = order[k + i] * y_row + start + d
                        expand_tile(low, low_at + i * low_row, low_row, b, b_at + d, b_row, rank, y, (at,), 1)
                    d += LANES
            for i in range(count):
                for e in range(whole, num):
                    total = np.float32(0.0)
                    for j in range(rank):
                        total += low[low_at + i * low_row + j] * value_at(b, b_at + j * b_row + e)
                    y[order[k + i] * y_row + start + e] += total
            k += count
