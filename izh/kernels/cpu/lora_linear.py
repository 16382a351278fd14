"""A linear layer and the low-rank corrections of its rows on CPU, in one kernel: y = x W^T + bias + B (A x).

Owns: the two phases. Each computes a share of the base's columns, which is arithmetic on weights that the cache holds,
and meanwhile fetches what the corrections read, which is work for the memory: first each adapter's A, once for all of
its rows, for low = A x; then B, for y += B low.
Must not know: tensors, adapters' names. Rows lie grouped by slot as in `AdapterRows`.
Invariant: a row's numbers depend on that row and its adapter alone, whatever else is in the step, on any number of
threads; without an adapter they are those of `linear.py`.

A thread owns the columns cuts[t] .. cuts[t + 1] of y, and no other touches them:

    first phase     | base, `early` columns |                         units of a few ranks, an equal share of their cost
    second phase                            | base, the others    |   pieces of BLOCK columns, once their base is there

Each goes on to the second phase by itself, and waits for the others' first only when it needs what that gives. Where
they do not come, as there may be fewer threads than shares, the rest of its second phase is left until all have ended.
"""

from typing import Any

import numpy as np
from numba import carray, prange

from izh.kernels.cpu.compile import count_of, count_up, float32_at, int32_at, kernel, uint16_at
from izh.kernels.cpu.fetch import BEFORE, PIECE, STEP_BYTES, USE, add_piece, start_table, start_walk
from izh.kernels.cpu.linear import COLUMNS, PARALLEL_WORK, carried_room, last_outputs, tile_outputs
from izh.kernels.cpu.lora_plan import (
    AT,
    BLOCK,
    RANKS,
    block_at,
    costs_of,
    cut_columns,
    find_fault,
    unit_share,
    units_of,
)
from izh.kernels.cpu.lora_rows import expand, shrink
from izh.kernels.cpu.simd import LINE_BYTES

PATIENCE = 1 << 16  # looks at whether the others have arrived: some 50 microseconds


@kernel()
def _pieces_of_a(units: Any, u: int, last: int, width: int, a: Any) -> Any:
    """What units [u, last) need, each at its index from u on."""
    pieces, p = start_table(last - u), 0
    for v in range(u, last):
        steps = (units[v, RANKS] * width * a.itemsize + STEP_BYTES - 1) // STEP_BYTES
        p = add_piece(pieces, p, a.ctypes.data + units[v, AT] * a.itemsize, STEP_BYTES, steps, v)
    pieces[p, USE] = last
    return pieces


@kernel()
def _pieces_of_b(start: int, stop: int, slots: Any, ranks: Any, offsets: Any, b: Any, b_row: int, max_rank: int) -> Any:
    """What columns [start, stop) need, each with the beginning of the columns that are corrected at once."""
    blocks, column = 0, start
    while column < stop:
        _part, column = block_at(column, stop, offsets)
        blocks += 1
    pieces, p, column = start_table(blocks * slots.size * (BLOCK * b.itemsize // STEP_BYTES + 1)), 0, start
    while column < stop:
        part, end = block_at(column, stop, offsets)
        for g in range(slots.size):
            row = slots[g] * max_rank * b_row
            line = (row + column) * b.itemsize // LINE_BYTES * LINE_BYTES
            for at in range(line, (row + end) * b.itemsize, STEP_BYTES):
                p = add_piece(pieces, p, b.ctypes.data + at, b_row * b.itemsize, ranks[slots[g], part], column)
        column = end
    pieces[p, USE] = stop
    return pieces[: p + 1]


@kernel()
def _first_phase(
    start: int, stop: int, u: int, last: int, units: Any, x: Any, rows: int, x_row: int, weight: Any, weight_row: int,
    width: int, bias: Any, y: Any, y_row: int, order: Any, a: Any, low: Any, low_row: int,
) -> None:  # fmt: skip
    """Base columns [start, stop), and units [u, last), whose A is fetched while the columns before are computed."""
    pieces, place = _pieces_of_a(units, u, last, width, a), start_walk()
    carried = carried_room(rows, width)
    for n in range(start, stop, COLUMNS):
        here, due = pieces[place[PIECE], USE], pieces[-1, BEFORE] * (n + COLUMNS - start) // (stop - start)
        tile_outputs(n, x, rows, x_row, weight, weight_row, width, bias, carried, y, y_row, pieces, place, due)
        if u < here:
            shrink(u, here, units, x, x_row, order, a, width, low, low_row, np.int64(0))
            u = here
    shrink(u, last, units, x, x_row, order, a, width, low, low_row, np.int64(0))


@kernel()
def _second_phase(
    start: int, done: int, stop: int, x: Any, rows: int, x_row: int, weight: Any, weight_row: int, width: int,
    bias: Any, y: Any, y_row: int, order: Any, starts: Any, slots: Any, ranks: Any, offsets: Any, costs: Any, low: Any,
    low_row: int, b: Any, b_row: int, max_rank: int, arrived: Any, threads: int,
) -> int:  # fmt: skip
    """Base columns [done, stop), and the corrections of [start, stop), whose B is fetched meanwhile. -1; or, if not all
    first phases have ended when `low` is needed, nothing is corrected, and this is how far the base is done."""
    pieces = _pieces_of_b(start, stop, slots, ranks, offsets, b, b_row, max_rank)
    place, carried = start_walk(), carried_room(rows, width)
    has_low, column = False, start
    for n in range(done, stop - COLUMNS + 1, COLUMNS):
        here, due = pieces[place[PIECE], USE], pieces[-1, BEFORE] * (n + COLUMNS - done) // (stop - done)
        tile_outputs(n, x, rows, x_row, weight, weight_row, width, bias, carried, y, y_row, pieces, place, due)
        if column < here:
            if not (has_low or _wait(arrived, threads)):
                return n + COLUMNS
            has_low = True
            column = _expand_pieces(
                column, here, n + COLUMNS, stop, offsets, costs, low, low_row, b, b_row, max_rank, order, starts, slots,
                ranks, y, y_row,
            )  # fmt: skip
    last_outputs(stop - (stop - done) % COLUMNS, stop, x, rows, x_row, weight, weight_row, width, bias, y, y_row)
    if not (has_low or _wait(arrived, threads)):
        return stop
    _expand_pieces(
        column, stop, stop, stop, offsets, costs, low, low_row, b, b_row, max_rank, order, starts, slots, ranks, y,
        y_row,
    )  # fmt: skip
    return -1


@kernel()
def _wait(arrived: Any, threads: int) -> bool:
    """Whether all threads' first phases have ended, now or soon."""
    looks = PATIENCE
    while looks > 0 and count_of(arrived) < threads:
        looks -= 1
    return looks > 0


@kernel()
def _expand_pieces(
    column: int, until: int, done: int, stop: int, offsets: Any, costs: Any, low: Any, low_row: int, b: Any, b_row: int,
    max_rank: int, order: Any, starts: Any, slots: Any, ranks: Any, y: Any, y_row: int,
) -> int:  # fmt: skip
    """Corrects the pieces that begin in [column, until) and whose base is `done`; where the next one begins."""
    while column < until:
        part, end = block_at(column, stop, offsets)
        if end > done:
            break
        if costs[part] > 0:
            expand(
                column, end, part, low, low_row, np.int64(0), b, b_row, max_rank, order, starts, slots, ranks,
                np.int64(0), slots.size, np.int64(order.size), y, y_row,
            )  # fmt: skip
        column = end
    return column


@kernel()
def _first_share(
    t: int, threads: int, cuts: Any, early: int, units: Any, x: Any, rows: int, x_row: int, weight: Any,
    weight_row: int, width: int, bias: Any, y: Any, y_row: int, order: Any, is_half: bool, a: Any, a_half: Any,
    low: Any, low_row: int,
) -> None:  # fmt: skip
    """The t-th thread's first phase."""
    start, u, last = cuts[t], unit_share(units, t, threads), unit_share(units, t + 1, threads)
    if is_half:
        _first_phase(
            start, start + early, u, last, units, x, rows, x_row, weight, weight_row, width, bias, y, y_row, order,
            a_half, low, low_row,
        )  # fmt: skip
    else:
        _first_phase(
            start, start + early, u, last, units, x, rows, x_row, weight, weight_row, width, bias, y, y_row, order, a,
            low, low_row,
        )  # fmt: skip


@kernel()
def _second_share(
    t: int, cuts: Any, done: int, x: Any, rows: int, x_row: int, weight: Any, weight_row: int, width: int, bias: Any,
    y: Any, y_row: int, order: Any, starts: Any, slots: Any, ranks: Any, offsets: Any, costs: Any, low: Any,
    low_row: int, is_half: bool, b: Any, b_half: Any, b_row: int, max_rank: int, arrived: Any, threads: int,
) -> int:  # fmt: skip
    """The t-th thread's second phase, from base column `done` on."""
    start, stop = cuts[t], cuts[t + 1]
    if is_half:
        return _second_phase(
            start, done, stop, x, rows, x_row, weight, weight_row, width, bias, y, y_row, order, starts, slots,
            ranks, offsets, costs, low, low_row, b_half, b_row, max_rank, arrived, threads,
        )  # fmt: skip
    return _second_phase(
        start, done, stop, x, rows, x_row, weight, weight_row, width, bias, y, y_row, order, starts, slots,
        ranks, offsets, costs, low, low_row, b, b_row, max_rank, arrived, threads,
    )  # fmt: skip


@kernel(parallel=True)
def linear_lora_rows(
    x_address: int, rows: int, x_row: int, width: int, weight_address: int, weight_row: int, bias_address: int,
    num_biases: int, is_half: bool, a_address: int, num_slots: int, parts: int, max_rank: int, b_address: int,
    b_row: int, outputs: int, offsets_address: int, ranks_address: int, order_address: int, num_order: int,
    starts_address: int, slots_address: int, num_groups: int, threads: int, y_address: int, y_row: int,
) -> int:  # fmt: skip
    """y = x W^T + bias, and y += corrections, of a and b in float16 if `is_half`. What `find_fault` finds, nothing
    computed then; else -1."""
    x, y = carray(float32_at(x_address), rows * x_row + width), carray(float32_at(y_address), rows * y_row + outputs)
    weight = carray(float32_at(weight_address), outputs * weight_row + width)
    bias = carray(float32_at(bias_address), num_biases)
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
    units = units_of(starts, slots, ranks, width, max_rank)
    costs = costs_of(starts, slots, ranks)
    num_units = units.shape[0] - 1
    shrinks = expands = 0  # what there is to fetch
    for u in range(num_units):
        shrinks += units[u, RANKS] * width
    for p in range(parts):
        for g in range(num_groups):
            expands += (offsets[p + 1] - offsets[p]) * ranks[slots[g], p]
    if rows * width * outputs < PARALLEL_WORK:
        threads = 1
    low_row = parts * max_rank
    low = np.empty(num_order * low_row, np.float32)
    cuts = cut_columns(costs, rows * width, offsets, threads)
    # The base's columns are split between the phases as what is fetched is, and alike in all threads.
    early = outputs
    for t in range(threads):
        early = min(early, cuts[t + 1] - cuts[t])
    early = early * shrinks // max(shrinks + expands, 1) // COLUMNS * COLUMNS
    arrived, reached = np.empty(1, np.int64), np.empty(threads, np.int64)
    arrived[0] = left = 0
    for t in prange(threads):
        _first_share(
            t, threads, cuts, early, units, x, rows, x_row, weight, weight_row, width, bias, y, y_row, order, is_half,
            a, a_half, low, low_row,
        )  # fmt: skip
        count_up(arrived)
        reached[t] = _second_share(
            t, cuts, cuts[t] + early, x, rows, x_row, weight, weight_row, width, bias, y, y_row, order, starts, slots,
            ranks, offsets, costs, low, low_row, is_half, b, b_half, b_row, max_rank, arrived, threads,
        )  # fmt: skip
    for t in range(threads):
        left += reached[t] >= 0
    if left > 0:
        for t in prange(threads):
            if reached[t] >= 0:
                _second_share(
                    t, cuts, reached[t], x, rows, x_row, weight, weight_row, width, bias, y, y_row, order, starts,
                    slots, ranks, offsets, costs, low, low_row, is_half, b, b_half, b_row, max_rank, arrived, threads,
                )  # fmt: skip
    return -1
