"""Low-rank corrections of rows on CPU: the kernel that streams each adapter's weights once for all of its rows.

Owns: the two phases, low = A x and y += B low, each cut into equal shares of its cost, so that one adapter and
sixty-four keep all threads equally busy.
Must not know: tensors, adapters' names. Rows lie grouped by slot as in `AdapterRows`.
Invariant: a row's numbers depend on that row and its adapter alone, whatever else is in the step, on any number of
threads. Nothing beyond a slot's real rank is read.
"""

from typing import Any

import numpy as np
from numba import carray, prange

from izh.kernels.cpu.compile import float32_at, int32_at, kernel, share
from izh.kernels.cpu.lora_tile import expand_tile
from izh.kernels.cpu.simd import LANES, dot_tile

BLOCK = 64  # outputs per unit of the second phase
STREAMING = 3  # what it costs to read a weight, in units of using it for one row
PARALLEL_WORK = 32768  # cost below which one thread does all


@kernel()
def find_fault(order: Any, starts: Any, slots: Any, ranks: Any, num_rows: int, num_slots: int, max_rank: int) -> int:
    """The first group with a row, slot or rank that does not exist; -1 if there is none."""
    parts = ranks.shape[1]
    for g in range(slots.size):
        if not (0 <= slots[g] < num_slots and 0 <= starts[g] <= starts[g + 1] <= order.size):
            return g
        for k in range(starts[g], starts[g + 1]):
            if not 0 <= order[k] < num_rows:
                return g
        for p in range(parts):
            if not 0 <= ranks[slots[g], p] <= max_rank:
                return g
    return -1


@kernel()
def is_long(order: Any, starts: Any, g: int, least: int) -> Any:
    """Whether the group has `least` rows or more and they adjoin, so that a matrix product need not gather them."""
    num = starts[g + 1] - starts[g]
    return num >= least and order[starts[g + 1] - 1] - order[starts[g]] == num - 1


@kernel()
def _dot_rows(
    x: Any, x_row: int, order: Any, first: int, stop: int, a: Any, at: int, width: int, rank: int, q: int, low: Any,
    low_at: int, low_row: int,
) -> None:  # fmt: skip
    """low[k, q : q + 4] = A's rows q .. q + 3 (those below `rank`) . x's row order[k], for k in [first, stop)."""
    sums = np.empty(8, np.float32)
    whole = width - width % LANES
    # The last four overlap those before; where there are fewer in all, one is taken four times.
    base = min(q, max(rank - 4, 0))
    stride = width if rank >= 4 else 0
    k = first
    while k < stop:
        x_at = order[k] * x_row
        count = 2 if stop - k >= 2 else 1
        if stride == 0:
            for j in range(rank):
                for i in range(count):
                    dot_tile(x, order[k + i] * x_row, 0, a, at + j * width, 0, whole, sums, 0, 4, 1)
                    total = sums[0]
                    for d in range(whole, width):
                        total += x[order[k + i] * x_row + d] * a[at + j * width + d]
                    low[low_at + (k + i) * low_row + j] = total
        else:
            if count == 2:
                between = order[k + 1] * x_row - x_at
                dot_tile(x, x_at, between, a, at + base * width, stride, whole, sums, 0, 4, 2)
            else:
                dot_tile(x, x_at, 0, a, at + base * width, stride, whole, sums, 0, 4, 1)
            for i in range(count):
                for j in range(q - base, 4):
                    total = sums[i * 4 + j]
                    for d in range(whole, width):
                        total += x[order[k + i] * x_row + d] * a[at + (base + j) * width + d]
                    low[low_at + (k + i) * low_row + base + j] = total
        k += count


@kernel()
def _shrink(
    start: int, stop: int, x: Any, x_row: int, a: Any, width: int, max_rank: int, order: Any, starts: Any, slots: Any,
    ranks: Any, least: int, low: Any,
) -> None:  # fmt: skip
    """The units of the first phase whose cost, in the sum of all, begins within [start, stop)."""
    parts = ranks.shape[1]
    at = 0
    for g in range(slots.size):
        rows = starts[g + 1] - starts[g]
        if is_long(order, starts, g, least):
            continue
        for p in range(parts):
            rank = ranks[slots[g], p]
            for q in range(0, rank, 4):
                if start <= at < stop:
                    _dot_rows(
                        x, x_row, order, starts[g], starts[g + 1], a, (slots[g] * parts + p) * max_rank * width, width,
                        rank, q, low, p * max_rank, parts * max_rank,
                    )  # fmt: skip
                at += 4 * width * (rows + STREAMING)
                if at >= stop:
                    return


@kernel()
def _expand_rows(
    first: int, stop: int, low: Any, low_at: int, low_row: int, b: Any, b_at: int, max_rank: int, rank: int, num: int,
    order: Any, y: Any, y_at: int, y_row: int, sums: Any,
) -> None:  # fmt: skip
    """y[order[k], y_at : y_at + num] += B's rows from b_at . low[k], for k in [first, stop); num <= BLOCK."""
    whole = num - num % LANES
    k = first
    while k < stop:
        count = min(4, stop - k)
        at = low_at + k * low_row
        for d in range(0, whole, LANES):
            if count == 4:
                expand_tile(low, at, low_row, b, b_at + d * max_rank, max_rank, rank, sums, d, BLOCK, 4)
            elif count == 3:
                expand_tile(low, at, low_row, b, b_at + d * max_rank, max_rank, rank, sums, d, BLOCK, 3)
            elif count == 2:
                expand_tile(low, at, low_row, b, b_at + d * max_rank, max_rank, rank, sums, d, BLOCK, 2)
            else:
                expand_tile(low, at, low_row, b, b_at + d * max_rank, max_rank, rank, sums, d, BLOCK, 1)
        for i in range(count):
            for d in range(whole, num):
                total = np.float32(0.0)
                for j in range(rank):
                    total += low[at + i * low_row + j] * b[b_at + d * max_rank + j]
                sums[i * BLOCK + d] = total
            to_at = order[k + i] * y_row + y_at
            to, delta = y[to_at : to_at + num], sums[i * BLOCK : i * BLOCK + num]
            for d in range(num):
                to[d] += delta[d]
        k += count


@kernel()
def _expand(
    start: int, stop: int, low: Any, b: Any, outputs: int, max_rank: int, offsets: Any, order: Any, starts: Any,
    slots: Any, ranks: Any, least: int, y: Any, y_row: int,
) -> None:  # fmt: skip
    """The units of the second phase whose cost, in the sum of all, begins within [start, stop)."""
    parts = ranks.shape[1]
    sums = np.empty(4 * BLOCK, np.float32)
    at = 0
    for g in range(slots.size):
        rows = starts[g + 1] - starts[g]
        if is_long(order, starts, g, least):
            continue
        for p in range(parts):
            rank = ranks[slots[g], p]
            if rank == 0:
                continue
            for d in range(offsets[p], offsets[p + 1], BLOCK):
                num = min(BLOCK, offsets[p + 1] - d)
                if start <= at < stop:
                    _expand_rows(
                        starts[g], starts[g + 1], low, p * max_rank, parts * max_rank, b,
                        (slots[g] * outputs + d) * max_rank, max_rank, rank, num, order, y, d, y_row, sums,
                    )  # fmt: skip
                at += num * rank * (rows + STREAMING)
                if at >= stop:
                    return


@kernel()
def _costs(
    order: Any, starts: Any, slots: Any, ranks: Any, offsets: Any, width: int, least: int
) -> tuple[int, int]:  # fmt: skip
    """What `_shrink` and `_expand` count up to."""
    shrink, expand = 0, 0
    for g in range(slots.size):
        rows = starts[g + 1] - starts[g]
        if not is_long(order, starts, g, least):
            for p in range(ranks.shape[1]):
                rank = ranks[slots[g], p]
                shrink += (rank + 3) // 4 * 4 * width * (rows + STREAMING)
                expand += (offsets[p + 1] - offsets[p]) * rank * (rows + STREAMING)
    return shrink, expand


@kernel(parallel=True)
def add_lora_rows(
    x_address: int, num_rows: int, x_row: int, width: int, a_address: int, num_slots: int, parts: int, max_rank: int,
    b_address: int, outputs: int, offsets_address: int, ranks_address: int, order_address: int, num_order: int,
    starts_address: int, slots_address: int, num_groups: int, least: int, threads: int, y_address: int, y_row: int,
) -> int:  # fmt: skip
    """Corrects the rows of all groups that are not long. What `find_fault` finds, nothing computed then; else -1."""
    x, y = carray(float32_at(x_address), num_rows * x_row), carray(float32_at(y_address), num_rows * y_row)
    a = carray(float32_at(a_address), num_slots * parts * max_rank * width)
    b = carray(float32_at(b_address), num_slots * outputs * max_rank)
    offsets = carray(int32_at(offsets_address), parts + 1)
    ranks = carray(int32_at(ranks_address), (num_slots, parts))
    order, starts = carray(int32_at(order_address), num_order), carray(int32_at(starts_address), num_groups + 1)
    slots = carray(int32_at(slots_address), num_groups)
    fault = find_fault(order, starts, slots, ranks, num_rows, num_slots, max_rank)
    if fault >= 0:
        return fault
    shrink, expand = _costs(order, starts, slots, ranks, offsets, width, least)
    if shrink == 0:
        return -1
    low = np.empty(num_order * parts * max_rank, np.float32)
    if shrink + expand < PARALLEL_WORK:
        threads = 1
    if threads == 1:
        _shrink(np.int64(0), shrink, x, x_row, a, width, max_rank, order, starts, slots, ranks, least, low)
        _expand(
            np.int64(0), expand, low, b, outputs, max_rank, offsets, order, starts, slots, ranks, least, y, y_row
        )  # fmt: skip
    else:
        for t in prange(threads):
            _shrink(
                share(shrink, t, threads), share(shrink, t + 1, threads), x, x_row, a, width, max_rank, order, starts,
                slots, ranks, least, low,
            )  # fmt: skip
        for t in prange(threads):
            _expand(
                share(expand, t, threads), share(expand, t + 1, threads), low, b, outputs, max_rank, offsets, order,
                starts, slots, ranks, least, y, y_row,
            )  # fmt: skip
    return -1
