"""Bidirectional attention on CPU over sequences laid end to end.

Owns: the walk over units of work. A unit is some rows of one sequence and one head; its keys (transposed) and
values are copied side by side first, so that both products are the same register tiles, without a sum across a vector.
Must not know: models.
Invariant: a row's numbers depend on its own sequence alone: rows come in tiles counted from the sequence's first row,
sums run in one order, and a key that a row does not see has weight zero.
"""

import math
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, int32_at, kernel, share
from izh.kernels.cpu.product import ANEW, add_product
from izh.kernels.cpu.simd import LANES
from izh.kernels.cpu.simd_attention import ROWS, aligned_room, copy, in_vectors, softmax_tile, transpose_tile

# Rows, a multiple of ROWS, that share one pass over the keys: their scores over 512 fill half a first-level cache.
TILE = 12
UNIT = 96  # rows of a unit: enough to pay for the copy of keys and values, few enough to share a long sequence
PARALLEL_WORK = 100_000  # scores x width below which one thread does all

_LOG2_E = np.float32(math.log2(math.e))
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-1e38)
_NO_WINDOW = 1 << 60


@kernel()
def _copy(source: Any, at: int, stride: int, count: int, width: int, factor: Any, to: Any, row: int) -> None:
    """to[i, :width] = factor * source row i."""
    for i in range(count):
        copy(source, at + i * stride, width, factor, to, i * row)


@kernel()
def _transpose(source: Any, at: int, stride: int, count: int, width: int, to: Any, row: int) -> None:
    """to[d, i] = source row i at d; what follows up to `row` is zero, so that a padded column holds a number."""
    i = 0
    while i < count:
        d, tall = 0, count - i >= LANES
        while d < width:
            if tall and width - d >= LANES:
                transpose_tile(source, at + i * stride + d, stride, to, d * row + i, row)
                d += LANES
            else:
                for j in range(i, min(i + LANES, count)):
                    to[d * row + j] = source[at + j * stride + d]
                d += 1
        i += LANES
    for d in range(width):
        to[d * row + count : (d + 1) * row] = _ZERO


@kernel()
def _attend_units(
    start: int, stop: int, units: Any, width: int, heads: int, starts: Any, longest: int, q: Any, k: Any, v: Any,
    q_row: int, k_row: int, v_row: int, head_stride: int, factor: Any, window: int, out: Any,
) -> None:  # fmt: skip
    """One thread's units."""
    padded, room = in_vectors(width), in_vectors(longest)
    keys, values = aligned_room(width * room), aligned_room(longest * padded)
    values[:] = _ZERO  # what pads a value stays zero
    queries, results = aligned_room(TILE * width), aligned_room(TILE * padded)
    scores, factors = aligned_room(TILE * room), np.empty(TILE, np.float32)
    maxima, totals = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    lows, highs = np.zeros(TILE, np.int64), np.zeros(TILE, np.int64)
    copied = (np.int64(-1), np.int64(-1), np.int64(-1), np.int64(-1))
    for unit in range(start, stop):
        s, head, first_row = units[unit, 0], units[unit, 1], units[unit, 2]
        begin, length = np.int64(starts[s]), np.int64(starts[s + 1]) - np.int64(starts[s])
        last_row = min(first_row + UNIT, length)
        key0, key1 = max(first_row - window, 0), min(last_row + window, length)
        count = in_vectors(key1 - key0)
        if copied != (s, head, key0, key1):
            _transpose(k, (begin + key0) * k_row + head * head_stride, k_row, key1 - key0, width, keys, count)
            _copy(v, (begin + key0) * v_row + head * head_stride, v_row, key1 - key0, width, _ONE, values, padded)
            copied = (s, head, key0, key1)
        for tile in range(first_row, last_row, TILE):
            num = min(TILE, last_row - tile)
            _copy(q, (begin + tile) * q_row + head * head_stride, q_row, num, width, factor, queries, width)
            # Only the keys that some row of the tile sees, in whole vectors.
            low = (max(tile - window, 0) - key0) // LANES * LANES
            high = min(tile + num + window, length) - key0
            columns = in_vectors(high - low)
            add_product(
                queries, 0, width, num, keys, low, count, width, scores, 0, columns, columns, factors, ANEW, None, 0
            )  # fmt: skip
            maxima[:], totals[:] = _LOWEST, _ZERO
            for i in range(num):
                lows[i] = max(tile + i - window, 0) - key0 - low
                highs[i] = min(tile + i + window + 1, length) - key0 - low
            for i in range(0, num, ROWS):
                softmax_tile(scores, i * columns, columns, 0, columns, i, lows, highs, maxima, totals, factors)
            add_product(
                scores, 0, columns, num, values, low * padded, padded, high - low, results, 0, padded, padded, factors,
                ANEW, None, 0,
            )  # fmt: skip
            for i in range(num):
                at = ((begin + tile + i) * heads + head) * width
                for d in range(width):
                    out[at + d] = results[i * padded + d] / totals[i]


@kernel(parallel=True)
def _packed_attention(
    q_address: int, k_address: int, v_address: int, q_row: int, k_row: int, v_row: int, head_stride: int, rows: int,
    heads: int, width: int, starts_address: int, num_sequences: int, scale: float, window: int, out_address: int,
    threads: int,
) -> int:  # fmt: skip
    """0, or 1 when the starts do not rise from 0 to `rows`; nothing is read then."""
    starts = carray(int32_at(starts_address), num_sequences + 1)
    q = carray(float32_at(q_address), rows * q_row + heads * head_stride)
    k = carray(float32_at(k_address), rows * k_row + heads * head_stride)
    v = carray(float32_at(v_address), rows * v_row + heads * head_stride)
    out = carray(float32_at(out_address), rows * heads * width)
    if starts[0] != 0 or starts[num_sequences] != rows:
        return 1
    num, longest, work = 0, 0, 0
    for s in range(num_sequences):
        length: Any = np.int64(starts[s + 1]) - np.int64(starts[s])
        if length < 0:
            return 1
        num += (length + UNIT - 1) // UNIT
        longest = max(longest, length)
        seen: Any = min(length, 2 * window + 1)
        work += length * seen
    units, costs = np.empty((num * heads, 3), np.int64), np.zeros(num * heads + 1, np.int64)
    n = 0
    for s in range(num_sequences):
        length = np.int64(starts[s + 1]) - np.int64(starts[s])
        for head in range(heads):  # a thread keeps a head's keys while its rows go on
            for first_row in range(0, length, UNIT):
                units[n, 0], units[n, 1], units[n, 2] = s, head, first_row
                n += 1
                rows_here: Any = min(UNIT, length - first_row)
                costs[n] = costs[n - 1] + rows_here * min(length, UNIT + 2 * window)
    factor = np.float32(scale) * _LOG2_E
    if work * heads * width < PARALLEL_WORK or threads == 1:
        _attend_units(
            np.int64(0), np.int64(n), units, width, heads, starts, longest, q, k, v, q_row, k_row, v_row, head_stride,
            factor, window, out,
        )  # fmt: skip
    else:
        for t in prange(threads):
            first = np.searchsorted(costs, share(costs[n], t, threads))
            last = np.searchsorted(costs, share(costs[n], t + 1, threads))
            _attend_units(
                np.int64(first), np.int64(last), units, width, heads, starts, longest, q, k, v, q_row, k_row, v_row,
                head_stride, factor, window, out,
            )  # fmt: skip
    return 0


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int | None) -> Tensor:
    """See `Ops.packed_attention`.  Raises: ValueError naming the argument."""
    shape = check("q", q, torch.float32, 3)
    rows, heads, width = shape
    for name, other in (("k", k), ("v", v)):
        if check(name, other, torch.float32, 3) != shape or other.stride(1) != q.stride(1):
            raise ValueError(f"{name}: shape {tuple(other.shape)}, strides {other.stride()} differ from q's")
    (num_starts,) = check("starts", starts, torch.int32, 1, contiguous=True)
    if num_starts < 1:
        raise ValueError("starts: is empty; it holds one more entry than there are sequences")
    if window is not None and window < 0:
        raise ValueError(f"window: {window}; 0 keys on each side are the least (None = no window)")
    out = torch.empty((rows, heads, width))
    fault = _packed_attention(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0), q.stride(1), rows, heads,
        width, starts.data_ptr(), num_starts - 1, float(scale), _NO_WINDOW if window is None else window,
        out.data_ptr(), numba.get_num_threads(),
    )  # fmt: skip
    if fault:
        raise ValueError(f"starts: {starts.tolist()} must rise from 0 to the number of rows, {rows}")
    return out
