"""Attention of one tile of query vectors over one span of pages.

Owns: the online softmax: scores, weights, weighted sums, and how two spans' results merge. Of each step the keys are
transposed and the values laid side by side once, so that both products are register tiles without a sum across a
vector; then the tile's queries go over the copies, a few at a time, each group only as far as it sees.
Must not know: which tiles and spans exist, threads, tensors.
Invariant: a row's numbers depend on that row and its keys alone. Steps lie at fixed positions of the context; a key
that a row does not see adds an exact zero; sums run in one order whatever shares the tile.

Arrays are flat: queries [rows * ratio, width], values [rows * ratio, padded] (the width in whole vectors), pages
[blocks, G, block, width]; a copy of keys [width, columns] (a step in whole vectors), of values [step, padded].
Source: Milakov and Gimelshein 2018, arXiv 1805.02867 (online softmax).
"""

from typing import Any

import numpy as np

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.exp2 import exp2
from izh.kernels.cpu.product import add_product
from izh.kernels.cpu.simd import LANES, LINE, fetch_line
from izh.kernels.cpu.simd_attention import softmax_row, transpose_tile

GROUP = 12  # query vectors that go over a step together: a multiple of the rows of a register tile

_NOTHING_SEEN = np.float32(-1e30)  # running maximum before any key was seen; below every real score
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel()
def in_vectors(count: int) -> int:
    """The least number of floats that fill whole vectors and hold `count`."""
    return (count + LANES - 1) // LANES * LANES


@kernel()
def fill(array: Any, at: int, count: int, value: Any) -> None:
    part = array[at : at + count]
    for i in range(part.size):
        part[i] = value


@kernel()
def copy(source: Any, at: int, count: int, factor: Any, to: Any, to_at: int) -> None:
    """Of `count` floats, times `factor`."""
    values, target = source[at : at + count], to[to_at : to_at + count]
    for i in range(values.size):
        target[i] = values[i] * factor


@kernel()
def _scale(array: Any, at: int, count: int, factor: Any) -> None:
    part = array[at : at + count]
    for i in range(part.size):
        part[i] *= factor


@kernel()
def _copy_keys(
    pages: Any, page_at: int, block: int, width: int, num_keys: int, keys: Any, columns: int, at: int, later: Any
) -> None:
    """keys[d, at + j] = the page's key j at d, for j < num_keys or more. Fetches the same page of `later`."""
    j = 0
    while j < num_keys:
        some = LANES if block - j >= LANES else 1
        d = 0
        while d < width:
            source, to = page_at + j * width + d, d * columns + at + j
            if some == LANES and width - d >= LANES:
                for i in range(LANES):
                    fetch_line(later, source + i * width)
                transpose_tile(pages, source, width, keys, to, columns)
                d += LANES
            else:
                for i in range(some):
                    keys[to + i] = pages[source + i * width]
                d += 1
        j += some


@kernel()
def _copy_values(pages: Any, page_at: int, width: int, padded: int, num_keys: int, values: Any, at: int) -> None:
    """values[at + j, :width] = value j of the page, j < num_keys."""
    if padded == width:
        copy(pages, page_at, num_keys * width, _ONE, values, at * width)
    else:
        for j in range(num_keys):
            copy(pages, page_at + j * width, width, _ONE, values, (at + j) * padded)


@kernel()
def merge(maximum: Any, total: Any, values: Any, more_maximum: Any, more_total: Any, more_values: Any) -> Any:
    """Fold a later span's (maximum, sum of weights, weighted values) of one row into the earlier; values in place."""
    new = max(maximum, more_maximum)
    old_factor, more_factor = exp2(maximum - new), exp2(more_maximum - new)
    for d in range(values.size):
        values[d] = values[d] * old_factor + more_values[d] * more_factor
    return new, total * old_factor + more_total * more_factor


@kernel()
def _weigh(
    queries: Any, at: int, num: int, ratio: int, width: int, padded: int, position: int, window: int, begin: int,
    end: int, keys: Any, columns: int, scores: Any, maxima: Any, totals: Any, values: Any,
) -> tuple[int, int]:  # fmt: skip
    """Scores become the weights of `num` query vectors from `at` on for the keys [begin, end) of a step, from whose
    start `position` counts; what was summed before is scaled to the new maxima. Returns the range of keys seen."""
    low = max(position + at // ratio + 1 - window, begin)
    high = min(position + (at + num - 1) // ratio + 1, end)
    if high <= low:
        return low, low
    start, stop = low // LANES * LANES, in_vectors(high)
    fill(scores, 0, num * columns, _ZERO)
    add_product(queries, at * width, width, num, keys, start, columns, width, scores, start, columns, stop - start)
    for i in range(num):
        row = at + i
        seen_to = position + row // ratio + 1
        row_low = max(seen_to - window, begin)
        row_high = max(min(seen_to, end), row_low)
        maximum, total = softmax_row(scores, i * columns, start, stop, row_low, row_high, maxima[row])
        factor = exp2(maxima[row] - maximum)
        maxima[row] = maximum
        totals[row] = totals[row] * factor + total
        _scale(values, row * padded, padded, factor)
    return low, high


@kernel()
def attend_span(
    queries: Any, ratio: int, rows: int, width: int, position: int, window: int, first: int, stop: int, block: int,
    step: int, k_pages: Any, v_pages: Any, blocks: Any, head: int, num_heads: int, scores: Any, keys: Any,
    step_values: Any, maxima: Any, totals: Any, values: Any, next_blocks: Any, next_head: int, next_key: int,
) -> None:  # fmt: skip
    """Online softmax of a tile over the keys [first, stop) of one span; fills maxima, totals and values of its rows.

    `scores` [GROUP, columns], `keys` and `step_values` are room. Memory is busy throughout: while a step's keys are
    read its values are fetched, and with its values the keys of the step after it. After the last one come those of
    `next_blocks` and `next_head` from `next_key` on.
    """
    num, page_floats = rows * ratio, block * width
    columns, padded = in_vectors(step), in_vectors(width)
    few = num <= GROUP and padded == width
    fill(maxima, 0, num, _NOTHING_SEEN)
    fill(totals, 0, num, _ZERO)
    fill(values, 0, num * padded, _ZERO)
    for step_at in range(first - first % step, stop, step):
        # Pages wholly before `first` may belong to others by now, and what lies at or after `stop` was never written.
        begin, end, row = max(first - step_at, 0), min(stop - step_at, step), position - step_at
        page_start, page_stop = begin // block, (end + block - 1) // block
        for page in range(page_start, page_stop):
            page_at = (blocks[step_at // block + page] * num_heads + head) * page_floats
            key = page * block
            _copy_keys(k_pages, page_at, block, width, min(block, end - key), keys, columns, key, v_pages)
        low = high = 0
        if few:
            low, high = _weigh(
                queries, 0, num, ratio, width, padded, row, window, begin, end, keys, columns, scores, maxima, totals,
                values,
            )  # fmt: skip
        later_blocks, later_head, later = blocks, head, (step_at + step) // block
        if step_at + step >= stop:
            later_blocks, later_head, later = next_blocks, next_head, next_key // block
        for page in range(page_start, page_stop):
            page_at = (blocks[step_at // block + page] * num_heads + head) * page_floats
            key = page * block
            num_keys = min(block, end - key)
            if later < later_blocks.size:
                later_at = (later_blocks[later] * num_heads + later_head) * page_floats
                for line in range(later_at, later_at + page_floats, LINE):
                    fetch_line(k_pages, line)
                later += 1
            if few:
                skip = max(low - key, 0)
                seen = min(high - key, num_keys) - skip
                if seen > 0:
                    at = page_at + skip * width
                    add_product(scores, key + skip, columns, num, v_pages, at, width, seen, values, 0, width, width)
            else:
                _copy_values(v_pages, page_at, width, padded, num_keys, step_values, key)
        if few:
            continue
        for at in range(0, num, GROUP):
            some = min(GROUP, num - at)
            low, high = _weigh(
                queries, at, some, ratio, width, padded, row, window, begin, end, keys, columns, scores, maxima, totals,
                values,
            )  # fmt: skip
            add_product(
                scores, low, columns, some, step_values, low * padded, padded, high - low, values, at * padded, padded,
                padded,
            )  # fmt: skip
