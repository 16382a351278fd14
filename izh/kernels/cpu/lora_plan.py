"""How the work of one corrected projection is cut into pieces and shares.

Owns: the check of a step's groups, the units of the first phase (some ranks of one adapter), the columns or rows that
each thread takes.
Must not know: arithmetic, tensors. Rows lie grouped by slot as in `AdapterRows`.
Invariant: columns are cut only a multiple of LANES after the beginning of a part, so a column's code path does not
depend on the number of threads.
"""

from typing import Any

import numpy as np

from izh.kernels.cpu.compile import kernel, share
from izh.kernels.cpu.simd import LANES

UNIT = 8  # ranks of a unit of the first phase, at most
BLOCK = 128  # columns of a piece of the second phase, at most
STREAMING = 3  # what it costs to read a weight, in units of using it for one row
# The columns of a table of units: the unit's rows order[FIRST : STOP], all of one adapter, where its A begins that is
# read, how many ranks of it, where low gets them, and the cost of all units before.
FIRST, STOP, AT, RANKS, LOW, COST, FIELDS = 0, 1, 2, 3, 4, 5, 6


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
def fill_units(
    units: Any, u: int, cost: int, first: int, stop: int, slot: int, ranks: Any, width: int, max_rank: int
) -> tuple[int, int]:
    """Puts the units of rows order[first : stop], all of this slot, into the table from u on, where the cost is `cost`;
    what u and the cost are then."""
    parts = ranks.shape[1]
    for p in range(parts):
        rank = ranks[slot, p]
        for q in range(0, rank, UNIT):
            num = min(UNIT, rank - q)
            units[u, FIRST], units[u, STOP] = first, stop
            units[u, AT], units[u, RANKS] = ((slot * parts + p) * max_rank + q) * width, num
            units[u, LOW], units[u, COST] = p * max_rank + q, cost
            cost += num * width * (stop - first + STREAMING)
            u += 1
    return u, cost


@kernel()
def units_of(starts: Any, slots: Any, ranks: Any, width: int, max_rank: int) -> Any:
    """The table of units of all groups; its last row is the end, with the whole cost."""
    num = 0
    for g in range(slots.size):
        for p in range(ranks.shape[1]):
            num += (ranks[slots[g], p] + UNIT - 1) // UNIT
    units = np.empty((num + 1, FIELDS), np.int64)
    u = cost = 0
    for g in range(slots.size):
        u, cost = fill_units(units, u, cost, starts[g], starts[g + 1], slots[g], ranks, width, max_rank)
    units[u, COST] = cost
    return units


@kernel()
def unit_share(units: Any, t: int, threads: int) -> int:
    """Where the t-th of `threads` equal shares of the units' cost begins."""
    last = units.shape[0] - 1
    due = share(units[last, COST], t, threads)
    u = 0
    while u < last and units[u, COST] < due:
        u += 1
    return u


@kernel()
def costs_of(starts: Any, slots: Any, ranks: Any) -> Any:
    """What a column of each part costs in the second phase."""
    costs = np.zeros(ranks.shape[1], np.int64)
    for g in range(slots.size):
        for p in range(costs.size):
            costs[p] += ranks[slots[g], p] * (starts[g + 1] - starts[g] + STREAMING)
    return costs


@kernel()
def cut_columns(costs: Any, each: int, offsets: Any, threads: int) -> Any:
    """Where each thread's columns begin, the end included, so that all cost the same; `each` is a column's own cost."""
    total = 0
    for p in range(costs.size):
        total += (offsets[p + 1] - offsets[p]) * (costs[p] + each)
    cuts = np.empty(threads + 1, np.int64)
    p = before = 0
    for t in range(threads):
        due = total * t // threads
        while p < costs.size and before + (offsets[p + 1] - offsets[p]) * (costs[p] + each) <= due:
            before += (offsets[p + 1] - offsets[p]) * (costs[p] + each)
            p += 1
        cuts[t] = offsets[p]
        if p < costs.size:
            cuts[t] += (due - before) // (costs[p] + each) // LANES * LANES
    cuts[0], cuts[threads] = 0, offsets[costs.size]
    return cuts


@kernel()
def block_at(column: int, stop: int, offsets: Any) -> tuple[int, int]:
    """The part that the column is in, and the end of the piece that begins there."""
    p = 0
    while p + 2 < offsets.size and offsets[p + 1] <= column:
        p += 1
    return p, min(column + BLOCK, min(offsets[p + 1], stop))


@kernel()
def row_cost(slot: int, ranks: Any, offsets: Any, width: int) -> int:
    """What the whole correction of a row costs."""
    cost = 0
    for p in range(ranks.shape[1]):
        cost += ranks[slot, p] * (width + offsets[p + 1] - offsets[p])
    return cost


@kernel()
def cut_rows(starts: Any, slots: Any, ranks: Any, offsets: Any, width: int, threads: int) -> Any:
    """Where each thread's rows begin in the order of groups, the end included, so that all cost the same."""
    total = 0
    for g in range(slots.size):
        total += (starts[g + 1] - starts[g]) * row_cost(slots[g], ranks, offsets, width)
    cuts = np.empty(threads + 1, np.int64)
    g = before = 0
    for t in range(threads):
        due = total * t // threads
        each = row_cost(slots[g], ranks, offsets, width)
        while g + 1 < slots.size and before + (starts[g + 1] - starts[g]) * each <= due:
            before += (starts[g + 1] - starts[g]) * each
            g += 1
            each = row_cost(slots[g], ranks, offsets, width)
        cuts[t] = min(starts[g] + (due - before) // max(each, 1), starts[g + 1])
    cuts[0], cuts[threads] = 0, starts[slots.size]
    return cuts
