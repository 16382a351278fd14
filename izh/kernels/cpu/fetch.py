"""What a kernel fetches for later while it computes: pieces of memory, asked for a little at a time.

Owns: the table of pieces and the walk along them.
Must not know: what they hold, or what is computed meanwhile.

A piece is a number of steps of STEP_BYTES, a fixed stride apart. What is asked for all at once memory would drop.
"""

from typing import Any

import numpy as np

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.simd import LINE_BYTES, fetch_at

_STEP_LINES = 4
STEP_BYTES = _STEP_LINES * LINE_BYTES
# The columns of a table: where a piece begins, how many bytes are between its steps, how many steps all pieces before
# have, and what needs it, which is whatever the caller says. The last row, where they end, has the last two.
_ADDRESS, _STRIDE, BEFORE, USE, _FIELDS = 0, 1, 2, 3, 4
PIECE, DONE = 0, 1  # of a place in the walk: which piece, and how many steps are done in all


@kernel()
def start_table(most: int) -> Any:
    """A table for up to `most` pieces, and none yet."""
    pieces = np.empty((most + 1, _FIELDS), np.int64)
    pieces[0, BEFORE] = 0
    return pieces


@kernel(inline=True)
def add_piece(pieces: Any, p: int, address: int, stride: int, steps: int, use: int) -> int:
    """Puts the p-th piece into the table; p + 1."""
    pieces[p, _ADDRESS], pieces[p, _STRIDE], pieces[p, USE] = address, stride, use
    pieces[p + 1, BEFORE] = pieces[p, BEFORE] + steps
    return p + 1


@kernel()
def start_walk() -> Any:
    """The place of a walk that begins."""
    return np.zeros(2, np.int64)


@kernel(inline=True)
def fetch_some(pieces: Any, place: Any, count: int, until: int) -> None:
    """Goes on by `count` steps, at most until so many are done in all."""
    p, done = place[PIECE], place[DONE]
    until = min(until, done + count)
    while done < until:
        address = pieces[p, _ADDRESS] + (done - pieces[p, BEFORE]) * pieces[p, _STRIDE]
        stop = min(until, pieces[p + 1, BEFORE])
        while done < stop:
            fetch_at(address, _STEP_LINES)
            address += pieces[p, _STRIDE]
            done += 1
        if done == pieces[p + 1, BEFORE]:
            p += 1
    place[PIECE], place[DONE] = p, done
