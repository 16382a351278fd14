"""How a step's attention is cut into units of work, and whether its index tensors make sense.

Owns: the unit table. A tile is some rows of one sequence times the query heads of one KV head, so that its pages are
read once for all of them; a unit is a tile and a range of spans (fixed pieces of the context). Threads take consecutive
units of about equal cost.
Must not know: tensors, softmax.
Invariant: cutting is a matter of time, never of arithmetic.
"""

from typing import Any

import numpy as np
from torch import Tensor

from izh.kernels.cpu.compile import kernel

TILE = 384  # query vectors that share one reading of the pages: they and their sums take 200 KB of width 64
SPLIT_ROWS = 8  # tiles of more rows keep their spans together: partial results would take more room than they save time

# A row of the unit table. PARTIAL: where the unit's partial results begin; -1 = it has all spans and writes the result.
SEQUENCE, FIRST_ROW, NUM_ROWS, HEAD, SPAN_START, SPAN_STOP, PARTIAL = range(7)

_FAULTS = 4  # a fault is its kind + _FAULTS * sequence
_BAD_START, _BAD_LENGTH, _SHORT_TABLE, _BAD_BLOCK = range(_FAULTS)


@kernel()
def rows_per_tile(ratio: int) -> int:
    return max(1, TILE // ratio)


@kernel()
def _rows_of_tile(rows: int, length: int, most: int, threads: int, total: int) -> Any:
    """Of a sequence; fewer than `most` where a thread would else have one tile of two, and another idle meanwhile."""
    tile = max(1, min(rows, most))
    while tile > SPLIT_ROWS and tile * length * 2 * threads > total:
        tile = (tile + 1) // 2
    return tile


@kernel()
def count_work(query_starts: Any, context_lens: Any) -> int:
    """Rows times keys, as if every row saw its sequence's whole context."""
    total = 0
    for s in range(context_lens.size):
        total += (query_starts[s + 1] - query_starts[s]) * context_lens[s]
    return total


@kernel()
def cut(
    query_starts: Any, context_lens: Any, num_heads: int, ratio: int, window: int, span: int, threads: int
) -> tuple[Any, Any, int]:
    """(units [U, 7], cost before each unit [U + 1], number of partial results)."""
    most = rows_per_tile(ratio)
    total = count_work(query_starts, context_lens) * num_heads
    capacity = 0
    for s in range(context_lens.size):
        rows = query_starts[s + 1] - query_starts[s]
        tile = _rows_of_tile(rows, context_lens[s], most, threads, total)
        capacity += ((rows + tile - 1) // tile) * num_heads * (context_lens[s] // span + 1)
    units = np.empty((capacity, 7), np.int64)
    costs = np.zeros(capacity + 1, np.int64)
    num, num_partial = 0, 0
    for s in range(context_lens.size):
        rows = query_starts[s + 1] - query_starts[s]
        tile = _rows_of_tile(rows, context_lens[s], most, threads, total)
        for first_row in range(0, rows, tile):
            num_rows = min(tile, rows - first_row)
            position = context_lens[s] - rows + first_row
            first, stop = max(0, position - window + 1), position + num_rows
            start_span, stop_span = first // span, (stop + span - 1) // span
            # Only where a whole tile would leave other threads idle.
            split = num_rows <= SPLIT_ROWS and num_rows * (stop - first) * 4 * threads > total
            for head in range(num_heads):
                for at in range(start_span, stop_span, 1 if split else stop_span - start_span):
                    end = at + 1 if split else stop_span
                    whole = end - at == stop_span - start_span
                    unit = units[num]
                    unit[SEQUENCE], unit[FIRST_ROW], unit[NUM_ROWS], unit[HEAD] = s, first_row, num_rows, head
                    unit[SPAN_START], unit[SPAN_STOP], unit[PARTIAL] = at, end, -1 if whole else num_partial
                    if not whole:
                        num_partial += num_rows * ratio
                    keys = min(stop, end * span) - max(first, at * span)
                    costs[num + 1] = costs[num] + num_rows * ratio * keys
                    num += 1
    return units[:num], costs[: num + 1], num_partial


@kernel()
def find_fault(
    query_starts: Any, context_lens: Any, block_table: Any, num_rows: int, block: int, num_blocks: int, window: int
) -> int:
    """The first thing that would make a kernel use memory that is not its own, for `describe_fault`; or -1."""
    num_sequences, table_width = block_table.shape
    if query_starts[0] != 0 or query_starts[num_sequences] != num_rows:
        return _BAD_START
    for s in range(num_sequences):
        rows, length = query_starts[s + 1] - query_starts[s], context_lens[s]
        if rows < 0:
            return _BAD_START + _FAULTS * s
        if length < rows:
            return _BAD_LENGTH + _FAULTS * s
        last = (length + block - 1) // block
        if last > table_width:
            return _SHORT_TABLE + _FAULTS * s
        for b in range(max(0, length - rows - window + 1) // block, last):
            if not 0 <= block_table[s, b] < num_blocks:
                return _BAD_BLOCK + _FAULTS * s
    return -1


def describe_fault(fault: int, query_starts: Tensor, context_lens: Tensor, block_table: Tensor, k_pages: Tensor) -> str:
    sequence, kind = divmod(fault, _FAULTS)
    num_blocks, _, block, _ = k_pages.shape
    length = int(context_lens[sequence])
    if kind == _BAD_START:
        return f"query_starts: {query_starts.tolist()} must rise from 0 to the number of rows of q"
    if kind == _BAD_LENGTH:
        return f"context_lens: {length} keys for sequence {sequence}, fewer than its rows of q"
    if kind == _SHORT_TABLE:
        return f"block_table: {block_table.shape[1]} blocks of {block} for sequence {sequence} of {length} keys"
    return (
        f"block_table: sequence {sequence} names a block outside 0..{num_blocks - 1}: {block_table[sequence].tolist()}"
    )
