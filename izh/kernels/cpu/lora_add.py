"""Low-rank corrections on CPU of rows whose base is there already: y += B (A x), for prompts above all.

Owns: the walk over rows. A thread takes a block of one adapter's rows through both products, so that x and y come from
memory once and the rest stays in the second cache.
Must not know: tensors, adapters' names. Rows lie grouped by slot as in `AdapterRows`.
Invariant: a row's numbers depend on that row and its adapter alone, whatever else is in the step, on any number of
threads.
"""

from typing import Any

import numpy as np
from numba import carray, prange

from izh.kernels.cpu.compile import float32_at, int32_at, kernel, uint16_at
from izh.kernels.cpu.lora_plan import FIELDS, UNIT, block_at, cut_rows, fill_units, find_fault, row_cost
from izh.kernels.cpu.lora_rows import expand, shrink

ROWS = 48  # of a block: a multiple of both tiles' rows
PARALLEL_WORK = 65536  # cost below which one thread does all


@kernel()
def _correct(
    k: int, until: int, x: Any, x_row: int, width: int, a: Any, b: Any, b_row: int, max_rank: int, offsets: Any,
    order: Any, starts: Any, slots: Any, ranks: Any, y: Any, y_row: int,
) -> None:  # fmt: skip
    """All of rows order[k : until]."""
    parts = ranks.shape[1]
    low_row, outputs = parts * max_rank, offsets[parts]
    low = np.empty(ROWS * low_row, np.float32)
    units = np.empty((parts * ((max_rank + UNIT - 1) // UNIT), FIELDS), np.int64)
    g = 0
    while k < until:
        while starts[g + 1] <= k:
            g += 1
        end = min(k + ROWS, min(starts[g + 1], until))
        num_units, _cost = fill_units(units, np.int64(0), np.int64(0), k, end, slots[g], ranks, width, max_rank)
        shrink(np.int64(0), num_units, units, x, x_row, order, a, width, low, low_row, k)
        column = 0
        while column < outputs:
            part, stop = block_at(column, outputs, offsets)
            expand(
                column, stop, part, low, low_row, k, b, b_row, max_rank, order, starts, slots, ranks, g, g + 1, end, y,
                y_row,
            )  # fmt: skip
            column = stop
        k = end


@kernel()
def _correct_share(
    t: int, cuts: Any, x: Any, x_row: int, width: int, is_half: bool, a: Any, a_half: Any, b: Any, b_half: Any,
    b_row: int, max_rank: int, offsets: Any, order: Any, starts: Any, slots: Any, ranks: Any, y: Any, y_row: int,
) -> None:  # fmt: skip
    """The t-th thread's rows."""
    k, until = cuts[t], cuts[t + 1]
    if is_half:
        _correct(
            k, until, x, x_row, width, a_half, b_half, b_row, max_rank, offsets, order, starts, slots, ranks, y, y_row
        )  # fmt: skip
    else:
        _correct(k, until, x, x_row, width, a, b, b_row, max_rank, offsets, order, starts, slots, ranks, y, y_row)


@kernel(parallel=True)
def add_lora_rows(
    x_address: int, rows: int, x_row: int, width: int, is_half: bool, a_address: int, num_slots: int, parts: int,
    max_rank: int, b_address: int, b_row: int, outputs: int, offsets_address: int, ranks_address: int,
    order_address: int, num_order: int, starts_address: int, slots_address: int, num_groups: int, threads: int,
    y_address: int, y_row: int,
) -> int:  # fmt: skip
    """y += corrections, of a and b in float16 if `is_half`. What `find_fault` finds, nothing computed then; else -1."""
    x, y = carray(float32_at(x_address), rows * x_row + width), carray(float32_at(y_address), rows * y_row + outputs)
    a_size, b_size = num_slots * parts * max_rank * width, num_slots * max_rank * b_row
    a, a_half = carray(float32_at(a_address), a_size), carray(uint16_at(a_address), a_size)
    b, b_half = carray(float32_at(b_address), b_size), carray(uint16_at(b_address), b_size)
    offsets = carray(int32_at(offsets_address), parts + 1)
    ranks = carray(int32_at(ranks_address), (num_slots, parts))
    order, starts = carray(int32_at(order_address), num_order), carray(int32_at(starts_address), num_groups + 1)
    slots = carray(int32_at(slots_address), num_groups)
    fault = find_fault(order, starts, slots, ranks, rows, num_slots, max_rank)
    if fault >= 0:
        return fault
    work = 0
    for g in range(num_groups):
        work += (starts[g + 1] - starts[g]) * row_cost(slots[g], ranks, offsets, width)
    if work < PARALLEL_WORK:
        threads = 1
    cuts = cut_rows(starts, slots, ranks, offsets, width, threads)
    if threads == 1:
        _correct_share(
            np.int64(0), cuts, x, x_row, width, is_half, a, a_half, b, b_half, b_row, max_rank, offsets, order, starts,
            slots, ranks, y, y_row,
        )  # fmt: skip
    else:
        for t in prange(threads):
            _correct_share(
                t, cuts, x, x_row, width, is_half, a, a_half, b, b_half, b_row, max_rank, offsets, order, starts, slots,
                ranks, y, y_row,
            )  # fmt: skip
    return -1
