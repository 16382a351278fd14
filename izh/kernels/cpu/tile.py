"""Attention of one tile of query vectors over one span of pages.

Owns: the online softmax: scores, weights, weighted sums, and how two spans' results merge. Keys lie in lanes, so
neither product sums across a vector. For many queries a step's keys are transposed and its values laid side by side
once, and the queries go over the copies in groups, each only as far as it sees; for few the keys are turned over in
registers, and the pages are read where they lie. The bits are the same.
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
from izh.kernels.cpu.product import ANEW, add_product
from izh.kernels.cpu.simd import LANES, LINE, fetch_lines
from izh.kernels.cpu.simd_attention import ROWS, copy, in_vectors, score_tile, softmax_tile, transpose_tile

GROUP = 12  # query vectors that go over a step together: a multiple of ROWS, and of the rows of a register tile

_NOTHING_SEEN = np.float32(-1e30)  # running maximum before any key was seen; below every real score
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel(inline=True)
def fill(array: Any, at: int, count: int, value: Any) -> None:
    part = array[at : at + count]
    for i in range(part.size):
        part[i] = value


@kernel()
def _copy_keys(
    pages: Any, page_at: int, block: int, width: int, num_keys: int, keys: Any, columns: int, at: int, later: Any
) -> None:
    """keys[d, at + j] = the page's key j at d, for j < num_keys or more. Fetches as much of `later`."""
    j = 0
    while j < num_keys:
        some = LANES if block - j >= LANES else 1
        d = 0
        while d < width:
            source, to = page_at + j * width + d, d * columns + at + j
            if some == LANES and width - d >= LANES:
                ahead = page_at + j * width + d * LANES
                for line in range(ahead, ahead + LANES * LANES, LINE):
                    fetch_lines(later, line, 1)
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


@kernel(inline=True)
def _score_page(
    queries: Any, num: int, width: int, pages: Any, page_at: int, num_keys: int, scores: Any, at: int, columns: int,
    later: Any, later_at: int,
) -> None:  # fmt: skip
    """scores[i, at + j] = queries[i] . key j of the page, j < num_keys or more. Fetches `later` at `later_at`."""
    for j in range(0, num_keys, LANES):
        key_at, ahead, to = page_at + j * width, later_at + j * width, at + j
        i = 0
        while i < num:
            q, s = i * width, i * columns + to
            if num - i >= 6:
                score_tile(queries, q, pages, key_at, width, scores, s, columns, later, ahead, 6)
                i += 6
            elif num - i >= 3:
                score_tile(queries, q, pages, key_at, width, scores, s, columns, later, ahead, 3)
                i += 3
            else:
                score_tile(queries, q, pages, key_at, width, scores, s, columns, later, ahead, 1)
                i += 1


@kernel(inline=True)
def _see(
    rows: int, ratio: int, position: int, window: int, begin: int, end: int, lows: Any, highs: Any
) -> None:  # fmt: skip
    """Of the keys [begin, end) of a step those, [low, high), that each query vector sees; `position`, of the first row,
    counts from the step's start. What fills the last ROWS is as the last vector."""
    i, low, high = 0, 0, 0
    for row in range(rows):
        low = min(max(position + row + 1 - window, begin), end)
        high = max(min(position + row + 1, end), low)
        for _ in range(ratio):
            lows[i], highs[i] = low, high
            i += 1
    for spare in range(i, i + ROWS - 1):
        lows[spare], highs[spare] = low, high


@kernel(inline=True)
def _weigh(
    at: int, num: int, low: int, high: int, columns: int, scores: Any, lows: Any, highs: Any, maxima: Any, totals: Any,
    factors: Any,
) -> None:  # fmt: skip
    """Turn the scores of the keys [low, high) into weights, for `num` query vectors from `at` on."""
    start, stop = low // LANES * LANES, in_vectors(high)
    for i in range(0, num, ROWS):
        softmax_tile(scores, i * columns, columns, start, stop, at + i, lows, highs, maxima, totals, factors)


@kernel(inline=True)
def attend_span(
    queries: Any, ratio: int, rows: int, width: int, position: int, window: int, first: int, stop: int, block: int,
    step: int, k_pages: Any, v_pages: Any, blocks: Any, head: int, num_heads: int, room: Any, maxima: Any, totals: Any,
    values: Any, next_blocks: Any, next_head: int, next_key: int,
) -> None:  # fmt: skip
    """Online softmax of a tile over the keys [first, stop) of one span; fills maxima, totals and values of its rows.

    `room`: scores [GROUP, columns], copies of keys and of values, and for each query vector the first key of a step
    that it sees, the one after the last, and the factor of what was summed before; of these ROWS more than vectors.
    Memory is busy throughout: while a page of keys is read its values are fetched, and with its values the keys of the
    page a step later. After the last one come those of `next_blocks` and `next_head` from `next_key` on.
    """
    scores, keys, step_values, lows, highs, factors = room
    num, page_floats = rows * ratio, block * width
    columns, padded = in_vectors(step), in_vectors(width)
    few = num <= GROUP and block % LANES == 0 and padded == width  # then copies would cost more than they save
    last_page = (stop + block - 1) // block
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
            if few:
                _score_page(
                    queries, num, width, k_pages, page_at, min(block, end - key), scores, key, columns, v_pages, page_at
                )  # fmt: skip
            else:
                _copy_keys(k_pages, page_at, block, width, min(block, end - key), keys, columns, key, v_pages)
        _see(rows, ratio, row, window, begin, end, lows, highs)
        low, high = lows[0], highs[num - 1]
        if few:
            _weigh(0, num, low, high, columns, scores, lows, highs, maxima, totals, factors)
        for page in range(page_start, page_stop):
            page_at = (blocks[step_at // block + page] * num_heads + head) * page_floats
            key, later_at, later = page * block, page_at, (step_at + step) // block + page
            if later < last_page:
                later_at = (blocks[later] * num_heads + head) * page_floats
            elif later - last_page < next_blocks.size - next_key // block:
                later_at = (next_blocks[next_key // block + later - last_page] * num_heads + next_head) * page_floats
            if few:
                skip, seen = max(low - key, 0), min(high - key, block)
                if seen > skip:
                    at, to = page_at + skip * width, key + skip
                    add_product(
                        scores, to, columns, num, v_pages, at, width, seen - skip, values, 0, width, width, factors, 0,
                        k_pages, later_at,
                    )  # fmt: skip
                    fill(factors, 0, num, _ONE)  # for the pages that follow
            else:
                # In the order in which the lines will be read, or the first waits for all.
                for d in range(0, width, LINE):
                    for line in range(later_at + d, later_at + page_floats, width):
                        fetch_lines(k_pages, line, 1)
                _copy_values(v_pages, page_at, width, padded, min(block, end - key), step_values, key)
        for at in range(0, 0 if few else num, GROUP):
            some = min(GROUP, num - at)
            low, high = lows[at], highs[at + some - 1]
            if high == low:
                continue
            start, floats = low // LANES * LANES, in_vectors(high) - low // LANES * LANES
            add_product(
                queries, at * width, width, some, keys, start, columns, width, scores, start, columns, floats, factors,
                ANEW, None, 0,
            )  # fmt: skip
            _weigh(at, some, low, high, columns, scores, lows, highs, maxima, totals, factors)
            add_product(
                scores, low, columns, some, step_values, low * padded, padded, high - low, values, at * padded, padded,
                padded, factors, at, None, 0,
            )  # fmt: skip
