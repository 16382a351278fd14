"""Attention of one tile of query rows over one span of pages.

Owns: the online softmax: scores, weights, weighted sums, and how two spans' results merge.
Must not know: which tiles and spans exist, threads, tensors.
Invariant: a row's numbers depend on that row and its keys alone. Steps lie at fixed positions of the context; a key
that a row does not see adds an exact zero; sums run in one order whatever shares the tile.

Arrays are flat: queries and values [rows * ratio, width], scores [rows * ratio, step], pages [blocks, G, block, width].
Source: Milakov and Gimelshein 2018, arXiv 1805.02867 (online softmax).
"""

from typing import Any

import numpy as np

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.exp2 import exp2
from izh.kernels.cpu.simd import LANES, LINE, accumulate_tile, dot_tile, fetch_line

NOTHING_SEEN = np.float32(-1e30)  # running maximum before any key was seen; below every real score
_MASKED = np.float32(-2e38)  # far below that, so that the weight of a masked key is exactly zero
_ONE = np.float32(1.0)


@kernel(fastmath={"nnan", "nsz", "reassoc", "contract"})
def _softmax_step(scores: Any, at: int, step: int, first: int, stop: int, maximum: Any) -> Any:
    """Turn scores[at : at + step] into weights 2^(score - new maximum), those outside [first, stop) into 0.

    Returns the new maximum and the sum of the weights. Always walks the whole step: a row's sum is then one order of
    additions, however many of the keys it sees.
    """
    row = scores[at : at + step]
    for j in range(first):
        row[j] = _MASKED
    for j in range(stop, step):
        row[j] = _MASKED
    for j in range(step):
        maximum = max(maximum, row[j])
    total = np.float32(0.0)
    for j in range(step):
        row[j] = exp2(row[j] - maximum)
    for j in range(step):
        total += row[j]
    return maximum, total


@kernel()
def _score_page(
    queries: Any, num: int, width: int, pages: Any, page_at: int, block: int, num_keys: int, scores: Any, at: int,
    step: int, later: Any,
) -> None:  # fmt: skip
    """scores[i, at + j] = queries[i] . key j of the page, j < num_keys; up to three keys more, all within the page.
    Fetches the page of `later` at the same place."""
    whole = width - width % LANES
    fours = block - block % 4
    for j in range(0, min(num_keys, fours), 4):
        key_at = page_at + j * width
        for line in range(key_at, key_at + 4 * width, LINE):
            fetch_line(later, line)
        i = 0
        while i < num:
            query_at, score_at = i * width, i * step + at + j
            if num - i >= 3:
                dot_tile(queries, query_at, width, pages, key_at, width, whole, scores, score_at, step, 3)
                i += 3
            elif num - i == 2:
                dot_tile(queries, query_at, width, pages, key_at, width, whole, scores, score_at, step, 2)
                i += 2
            else:
                dot_tile(queries, query_at, width, pages, key_at, width, whole, scores, score_at, step, 1)
                i += 1
    # What a vector does not reach: the end of an odd width, and the last keys of an odd block.
    for j in range(num_keys):
        if j >= fours or whole < width:
            for i in range(num):
                total = scores[i * step + at + j] if j < fours else np.float32(0.0)
                for d in range(whole if j < fours else 0, width):
                    total += queries[i * width + d] * pages[page_at + j * width + d]
                scores[i * step + at + j] = total


@kernel()
def _add_page(
    weights: Any, at: int, step: int, num: int, pages: Any, page_at: int, width: int, num_keys: int, out: Any,
    later: Any, later_at: int, later_stop: int,
) -> None:  # fmt: skip
    """out[i] += sum over j < num_keys of weights[i, at + j] * value j of the page. Fetches [later_at, later_stop) of
    `later`."""
    for line in range(later_at, later_stop, LINE):
        fetch_line(later, line)
    d = 0
    while width - d >= LANES:
        wide = width - d >= 4 * LANES
        i = 0
        while i < num:
            w, v, o = i * step + at, page_at + d, i * width + d
            if wide:
                if num - i >= 3:
                    accumulate_tile(weights, w, step, pages, v, width, num_keys, out, o, width, 3, 4)
                    i += 3
                elif num - i == 2:
                    accumulate_tile(weights, w, step, pages, v, width, num_keys, out, o, width, 2, 4)
                    i += 2
                else:
                    accumulate_tile(weights, w, step, pages, v, width, num_keys, out, o, width, 1, 4)
                    i += 1
            else:
                accumulate_tile(weights, w, step, pages, v, width, num_keys, out, o, width, 1, 1)
                i += 1
        d += 4 * LANES if wide else LANES
    for i in range(num):
        for e in range(d, width):
            for j in range(num_keys):
                out[i * width + e] += weights[i * step + at + j] * pages[page_at + j * width + e]


@kernel()
def merge(maximum: Any, total: Any, values: Any, more_maximum: Any, more_total: Any, more_values: Any) -> Any:
    """Fold a later span's (maximum, sum of weights, weighted values) of one row into the earlier; values in place."""
    new = max(maximum, more_maximum)
    old_factor, more_factor = exp2(maximum - new), exp2(more_maximum - new)
    for d in range(values.size):
        values[d] = values[d] * old_factor + more_values[d] * more_factor
    return new, total * old_factor + more_total * more_factor


@kernel()
def attend_span(
    queries: Any, ratio: int, rows: int, width: int, position: int, window: int, first: int, stop: int, block: int,
    step: int, k_pages: Any, v_pages: Any, blocks: Any, head: int, num_heads: int, scores: Any, maxima: Any,
    totals: Any, values: Any, next_blocks: Any, next_head: int, next_key: int,
) -> None:  # fmt: skip
    """Online softmax of a tile over the keys [first, stop) of one span; fills maxima, totals and values of its rows.

    Memory is busy throughout: while a step's keys are read its values are fetched, and with its values the keys of the
    step after it. After the last one come those of `next_blocks` and `next_head` from `next_key` on.
    """
    num, page_floats = rows * ratio, block * width
    for i in range(num):
        maxima[i], totals[i] = NOTHING_SEEN, np.float32(0.0)
    for d in range(num * width):
        values[d] = np.float32(0.0)
    for step_at in range(first - first % step, stop, step):
        # Pages wholly before `first` may belong to others by now, and what lies at or after `stop` was never written.
        page_start = max(first - step_at, 0) // block
        page_stop = (min(stop - step_at, step) + block - 1) // block
        for page in range(page_start, page_stop):
            page_at = (blocks[step_at // block + page] * num_heads + head) * page_floats
            keys = min(block, stop - step_at - page * block)
            _score_page(queries, num, width, k_pages, page_at, block, keys, scores, page * block, step, v_pages)
        for i in range(num):
            row_stop = position + i // ratio + 1
            low = min(max(max(row_stop - window, first) - step_at, 0), step)
            high = min(max(min(row_stop, stop) - step_at, low), step)
            maximum, total = _softmax_step(scores, i * step, step, low, high, maxima[i])
            factor = exp2(maxima[i] - maximum)
            maxima[i] = maximum
            totals[i] = totals[i] * factor + total
            if factor != _ONE:
                for d in range(i * width, (i + 1) * width):
                    values[d] *= factor
        later_blocks, later_head, later = blocks, head, (step_at + step) // block
        if step_at + step >= stop:
            later_blocks, later_head, later = next_blocks, next_head, next_key // block
        for page in range(page_start, page_stop):
            page_at = (blocks[step_at // block + page] * num_heads + head) * page_floats
            keys = min(block, stop - step_at - page * block)
            later_at = later_stop = 0
            if later < later_blocks.size:
                later_at = (later_blocks[later] * num_heads + later_head) * page_floats
                later_stop = later_at + page_floats
                later += 1
            _add_page(
                scores, page * block, step, num, v_pages, page_at, width, keys, values, k_pages, later_at, later_stop
            )
