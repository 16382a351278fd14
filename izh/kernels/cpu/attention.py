"""Paged attention on CPU: decode rows and chunks of any length in one op.

Owns: the walk over units of work (`cut.py`), and the merging of what was split.
Must not know: models, sequences beyond their row ranges, the softmax itself (`tile.py`).
Invariant: every SPAN keys a new online softmax begins, and results merge in order whether one thread takes all spans of
a tile or many share them. So the numbers of a row do not depend on threads, tiles or neighbours.

Microseconds, medians of 7, 9 heads / 3 KV heads x 64 on 2 cores of a Zen 5, scattered pages of six layers in turn, and
240 MB of other memory read between; in brackets GFLOP/s, where the products alone, in the first-level cache, reach 255
a core, or how much longer than a plain read of as many bytes:
32 sequences x 160 keys, one row each     313 (1.6x)
32 sequences x 1024 keys, one row each    1752 (1.5x)
1 sequence x 4096 keys, one row           245 (1.6x)
8 sequences x 4096 keys, one row each     1793 (1.4x)
32 sequences x 192 keys, four rows each   348
16 prompts of 128                         1345 (226)
32 prompts of 128                         2748 (222)
4 prompts of 512                          3704 (327)
2 prompts of 1024                         6949 (348)
1 prompt of 2048                          13656 (354)
"""

import math
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, int32_at, int64_at, kernel, share
from izh.kernels.cpu.cut import (
    FIRST_ROW,
    HEAD,
    NUM_ROWS,
    PARTIAL,
    SEQUENCE,
    SPAN_START,
    SPAN_STOP,
    count_work,
    cut,
    describe_fault,
    find_fault,
    rows_per_tile,
)
from izh.kernels.cpu.simd import LINE
from izh.kernels.cpu.simd_attention import ROWS, aligned_room, copy, in_vectors
from izh.kernels.cpu.tile import GROUP, attend_span, fill, merge

STEP = 64  # keys per update of the online softmax: long enough to pay for it, short enough for the first-level cache
SPAN = 512  # keys per independent piece: the least that one thread takes of a long context
PARALLEL_WORK = 100_000  # query heads x keys x width, below which one thread does all: about 10 us on one core

_LOG2_E = np.float32(math.log2(math.e))  # the softmax works in powers of two
NO_WINDOW = 1 << 62
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel(inline=True)
def _attend_unit(
    unit: Any, position: int, window: int, block: int, step: int, span: int, width: int, ratio: int, num_heads: int,
    k_pages: Any, v_pages: Any, blocks: Any, queries: Any, room: Any, now: Any, so_far: Any, next_blocks: Any,
    next_head: int, next_key: int,
) -> None:  # fmt: skip
    """Leave the unit's result in `so_far`; `now` is room for one span. Both are (maxima, totals, values). `room`: see
    `attend_span`."""
    rows, head = unit[NUM_ROWS], unit[HEAD]
    first, stop = max(0, position - window + 1), position + rows
    for at in range(unit[SPAN_START], unit[SPAN_STOP]):
        maxima, totals, values = so_far if at == unit[SPAN_START] else now
        later_blocks, later_head, later_key = blocks, head, (at + 1) * span
        if at + 1 == unit[SPAN_STOP]:
            later_blocks, later_head, later_key = next_blocks, next_head, next_key
        attend_span(
            queries, ratio, rows, width, position, window, max(first, at * span), min(stop, (at + 1) * span), block,
            step, k_pages, v_pages, blocks, head, num_heads, room, maxima, totals, values, later_blocks, later_head,
            later_key,
        )  # fmt: skip
        if at > unit[SPAN_START]:
            padded = in_vectors(width)
            for i in range(rows * ratio):
                row = slice(i * padded, i * padded + width)
                so_far[0][i], so_far[1][i] = merge(
                    so_far[0][i], so_far[1][i], so_far[2][row], maxima[i], totals[i], values[row]
                )


@kernel()
def _sizes(ratio: int, width: int, step: int) -> tuple[int, int, int, int, int]:
    """Floats of a thread's queries, scores, copies of a step's keys and of its values, and of a result's values."""
    rows, columns, padded = rows_per_tile(ratio) * ratio, in_vectors(step), in_vectors(width)
    return rows * width, GROUP * columns, width * columns, step * padded, (rows + ROWS) * padded


@kernel()
def _memory(ratio: int, width: int, step: int) -> Any:
    """All that a thread works in. Its parts are borrowed by address: an array that has an owner is counted, in atomic
    operations, each time it is handed on, and for a row of a hundred keys that took as long as the arithmetic."""
    queries, scores, keys, step_values, values = _sizes(ratio, width, step)
    entries = rows_per_tile(ratio) * ratio + ROWS
    return aligned_room(queries + scores + keys + step_values + 2 * values + 9 * entries + 11 * LINE)


@kernel()
def _floats(at: int, count: int) -> tuple[Any, int]:
    """An array at the address, and where the next one begins a cache line."""
    return carray(float32_at(at), count), at + 4 * ((count + LINE - 1) // LINE * LINE)


@kernel()
def _partial_room(num: int, width: int) -> tuple[Any, Any, Any]:
    return np.empty(num, np.float32), np.empty(num, np.float32), np.empty(num * width, np.float32)


@kernel(inline=True)
def _write(out: Any, at: int, total: Any, values: Any, values_at: int, width: int) -> None:
    copy(values, values_at, width, _ONE / total, out, at)


@kernel(inline=True)
def _position(unit: Any, query_starts: Any, context_lens: Any) -> int:
    """Of the unit's first row."""
    s = unit[SEQUENCE]
    return context_lens[s] - query_starts[s + 1] + query_starts[s] + unit[FIRST_ROW]


@kernel()
def _attend_units(
    start: int, stop: int, table: Any, q: Any, q_row: int, q_head: int, k_pages: Any, v_pages: Any, query_starts: Any,
    context_lens: Any, block_table: Any, num_heads: int, ratio: int, width: int, block: int, step: int, span: int,
    scale: float, window: int, partial: Any, out: Any, memory: Any,
) -> None:  # fmt: skip
    """One thread's share, with its `memory`."""
    entries, padded = rows_per_tile(ratio) * ratio + ROWS, in_vectors(width)
    queries_size, scores_size, keys_size, step_size, values_size = _sizes(ratio, width, step)
    units = carray(int64_at(np.int64(table.ctypes.data)), table.shape)
    at = np.int64(memory.ctypes.data)
    queries, at = _floats(at, queries_size)
    scores, at = _floats(at, scores_size)
    keys, at = _floats(at, keys_size)
    step_values, at = _floats(at, step_size)
    values_now, at = _floats(at, values_size)
    values_so_far, at = _floats(at, values_size)
    maxima_now, at = _floats(at, entries)
    maxima_so_far, at = _floats(at, entries)
    totals_now, at = _floats(at, entries)
    totals_so_far, at = _floats(at, entries)
    factors, at = _floats(at, entries)
    lows, highs = carray(int64_at(at), entries), carray(int64_at(at + 8 * entries), entries)
    fill(step_values, 0, step_size, _ZERO)  # what pads a value stays zero
    room = (scores, keys, step_values, lows, highs, factors)
    now, so_far = (maxima_now, totals_now, values_now), (maxima_so_far, totals_so_far, values_so_far)
    factor = np.float32(scale) * _LOG2_E
    for u in range(start, stop):
        unit = units[u]
        s, head, num = unit[SEQUENCE], unit[HEAD], unit[NUM_ROWS] * ratio
        first_row = query_starts[s] + unit[FIRST_ROW]
        position = _position(unit, query_starts, context_lens)
        after = units[min(u + 1, stop - 1)]
        next_key = max(after[SPAN_START] * span, _position(after, query_starts, context_lens) - window + 1)
        for row in range(unit[NUM_ROWS]):
            for i in range(ratio):
                at = (first_row + row) * q_row + (head * ratio + i) * q_head
                copy(q, at, width, factor, queries, (row * ratio + i) * width)
        _attend_unit(
            unit, position, window, block, step, span, width, ratio, num_heads, k_pages, v_pages, block_table[s],
            queries, room, now, so_far, block_table[after[SEQUENCE]], after[HEAD], next_key - next_key % step,
        )  # fmt: skip
        maxima, totals, values = so_far
        if unit[PARTIAL] < 0:
            for row in range(unit[NUM_ROWS]):
                at = ((first_row + row) * num_heads + head) * ratio * width
                for i in range(row * ratio, row * ratio + ratio):
                    _write(out, at, totals[i], values, i * padded, width)
                    at += width
            continue
        for i in range(num):
            p = unit[PARTIAL] + i
            partial[0][p], partial[1][p] = maxima[i], totals[i]
            copy(values, i * padded, width, _ONE, partial[2], p * width)


@kernel()
def _same_tile(a: Any, b: Any) -> bool:
    return a[SEQUENCE] == b[SEQUENCE] and a[FIRST_ROW] == b[FIRST_ROW] and a[HEAD] == b[HEAD]


@kernel()
def _merge_partial(
    units: Any, query_starts: Any, num_heads: int, ratio: int, width: int, partial: Any, out: Any
) -> None:
    """Merge the spans of the tiles that were split. The units of a tile and head follow each other, spans ascending."""
    maxima, totals, values = partial
    u = 0
    while u < len(units):
        unit = units[u]
        u += 1
        if unit[PARTIAL] < 0:
            continue
        num, end = unit[NUM_ROWS] * ratio, u
        while end < len(units) and _same_tile(unit, units[end]):
            end += 1
        for i in range(num):
            p = unit[PARTIAL] + i
            row = values[p * width : (p + 1) * width]
            maximum, total = maxima[p], totals[p]
            for later in range(u, end):
                m = units[later][PARTIAL] + i
                maximum, total = merge(maximum, total, row, maxima[m], totals[m], values[m * width : (m + 1) * width])
            token = query_starts[unit[SEQUENCE]] + unit[FIRST_ROW] + i // ratio
            at = ((token * num_heads + unit[HEAD]) * ratio + i % ratio) * width
            _write(out, at, total, values, p * width, width)
        u = end


@kernel(parallel=True)
def paged_attention_kernel(
    q_address: int, q_row: int, q_head: int, k_address: int, v_address: int, page_floats: int, starts_address: int,
    lens_address: int, table_address: int, num_sequences: int, table_width: int, num_rows: int, num_heads: int,
    ratio: int, width: int, block: int, scale: float, window: int, threads: int, out_address: int,
) -> int:  # fmt: skip
    """What `find_fault` finds, nothing computed then; else -1."""
    q = carray(float32_at(q_address), num_rows * q_row)
    k_pages, v_pages = carray(float32_at(k_address), page_floats), carray(float32_at(v_address), page_floats)
    query_starts = carray(int32_at(starts_address), num_sequences + 1)
    context_lens = carray(int32_at(lens_address), num_sequences)
    block_table = carray(int32_at(table_address), (num_sequences, table_width))
    out = carray(float32_at(out_address), num_rows * num_heads * ratio * width)
    step = max(1, STEP // block) * block
    span = max(1, SPAN // step) * step
    num_blocks = page_floats // (num_heads * block * width)
    fault = find_fault(query_starts, context_lens, block_table, num_rows, block, num_blocks, window)
    if fault >= 0:
        return fault
    if count_work(query_starts, context_lens) * num_heads * ratio * width < PARALLEL_WORK:
        threads = 1
    units, costs, num_partial = cut(query_starts, context_lens, num_heads, ratio, window, span, threads)
    partial = _partial_room(num_partial, width)
    if threads == 1:
        _attend_units(
            np.int64(0), len(units), units, q, q_row, q_head, k_pages, v_pages, query_starts, context_lens, block_table,
            num_heads, ratio, width, block, step, span, scale, window, partial, out, _memory(ratio, width, step),
        )  # fmt: skip
    else:
        for thread in prange(threads):
            start = np.searchsorted(costs, share(costs[-1], thread, threads))
            stop = np.searchsorted(costs, share(costs[-1], thread + 1, threads))
            _attend_units(
                start, stop, units, q, q_row, q_head, k_pages, v_pages, query_starts, context_lens, block_table,
                num_heads, ratio, width, block, step, span, scale, window, partial, out, _memory(ratio, width, step),
            )  # fmt: skip
    if num_partial:
        _merge_partial(units, query_starts, num_heads, ratio, width, partial, out)
    return -1


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `Ops.paged_attention`. Float32 on CPU; q may be a view of wider rows, all else is contiguous.

    Raises: ValueError naming the argument whose dtype, shape, layout or content does not fit.
    """
    num_rows, num_query_heads, width = check("q", q, torch.float32, 3)
    shape = check("k_pages", k_pages, torch.float32, 4, contiguous=True)
    _, num_heads, block, page_width = shape
    if check("v_pages", v_pages, torch.float32, 4, contiguous=True) != shape:
        raise ValueError(f"v_pages: shape {tuple(v_pages.shape)} differs from k_pages {tuple(shape)}")
    if page_width != width or num_query_heads % num_heads:
        raise ValueError(f"q: {num_query_heads} heads x {width} do not fit pages of {num_heads} heads x {page_width}")
    num_sequences, table_width = check("block_table", block_table, torch.int32, 2, contiguous=True)
    if check("query_starts", query_starts, torch.int32, 1, contiguous=True)[0] != num_sequences + 1:
        raise ValueError(f"query_starts: {query_starts.shape[0]} entries for {num_sequences} sequences; need one more")
    if check("context_lens", context_lens, torch.int32, 1, contiguous=True)[0] != num_sequences:
        raise ValueError(f"context_lens: {context_lens.shape[0]} entries for {num_sequences} sequences")
    if window is not None and window < 1:
        raise ValueError(f"window: {window} keys; a row sees at least itself, so the least is 1 (None = no window)")
    out = torch.empty((num_rows, num_query_heads, width))
    q_row, q_head, _ = q.stride()
    fault = paged_attention_kernel(
        q.data_ptr(), q_row, q_head, k_pages.data_ptr(), v_pages.data_ptr(), k_pages.numel(), query_starts.data_ptr(),
        context_lens.data_ptr(), block_table.data_ptr(), num_sequences, table_width, num_rows, num_heads,
        num_query_heads // num_heads, width, block, float(scale), NO_WINDOW if window is None else window,
        numba.get_num_threads(), out.data_ptr(),
    )  # fmt: skip
    if fault >= 0:
        raise ValueError(describe_fault(fault, query_starts, context_lens, block_table, k_pages))
    return out
