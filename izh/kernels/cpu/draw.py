"""Drawing tokens on CPU: the tokens that `izh/kernels/draw.py` defines, found without sorting a vocabulary.

Must not know: requests, random streams.
Invariant: a row is drawn by one thread, from its own numbers alone. Sums of weights are exact, so blocks, vectors and
shortlists change no token.

One pass over a row makes x and, for each block of columns, the largest. Without filters it also weighs every column:
the token's block is found by the blocks' sums, the token within it. With filters a second pass takes down the shortlist
of what may be kept, in the blocks whose largest may be; all else is done there. What may be kept:

    min-p   what is kept
    top-k   what is at least as likely as the k-th of the blocks' largest
    top-p   alone: what weighs at least (1 - top_p) / V of the row (half of that, so that rounding is no matter): all
            that weighs less weighs less than 1 - top_p together

The floor of top-k and of top-p is found in the shortlist digit by digit (`_floor`), in three rounds whatever is tied.

Milliseconds for the sampling of a step, 32 rows of 49,152 logits of SmolLM2-135M on 2 cores, this / sorting in torch:
temperature 0.9 / 1.4; top-p 0.9 1.5 / 4.0, and at temperature 1.5 2.2 / 10; top-k 50 0.6 / 1.5. One row: 0.1 to 0.2.
"""

import math
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, float64_at, int64_at, kernel, share
from izh.kernels.draw import LEAST_X, LN2_HIGH, LN2_LOW, LOG2_E, TAYLOR, Filters, scale_of

_BLOCK = 64  # columns: few enough that one of them is read in no time, enough to make block maxima a short list
_LEAST = np.float32(LEAST_X)
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(LOG2_E), np.float32(LN2_HIGH), np.float32(LN2_LOW)
_TAYLOR = tuple(np.float32(coefficient) for coefficient in TAYLOR)
_ROUND = np.float32(1.5 * 2**23)  # adding and taking it away again rounds to whole numbers, ties to even
_ROUND_WIDE = 1.5 * 2**52
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
_DIGITS = 2048  # of 11 bits, then two of 10: the bits of a float32 without its sign
_MAGNITUDE = np.int64(0x7FFFFFFF)
_NOTHING = np.float32(-np.inf)
_SUM = {"nnan", "nsz", "reassoc"}  # of exact sums, and of maxima


@kernel()
def _weigh(x: Any, scale: float) -> Any:
    """See `izh.kernels.draw.weigh`: the same steps, none fused."""
    x = x if x > _LEAST else _LEAST
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    c = _TAYLOR
    series = c[0] + r * (c[1] + r * (c[2] + r * (c[3] + r * (c[4] + r * (c[5] + r * (c[6] + r * c[7]))))))
    power = np.int32(np.int32(np.int32(n) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)
    return (np.float64(series * power) * scale + _ROUND_WIDE) - _ROUND_WIDE


@kernel()
def _scale_block(row: Any, peak: float, temperature: float, x: Any) -> None:
    for j in range(x.size):
        x[j] = (row[j] - peak) / temperature


@kernel(fastmath=_SUM)
def _largest(x: Any) -> Any:
    top = _NOTHING
    for j in range(x.size):
        top = max(top, x[j])
    return top


@kernel(fastmath=_SUM)
def _mass(x: Any, scale: float) -> Any:
    total = 0.0
    for j in range(x.size):
        total += _weigh(x[j], scale)
    return total


@kernel()
def _floor(values: Any, weights: Any, by_weight: bool, limit: float, sums: Any) -> Any:
    """The least value such that all above it weigh less than `limit`, or number less; -inf if all values do.

    Values are 0 or negative, so the larger the bits without the sign, the less likely. `sums` [_DIGITS] is scratch.
    """
    above, prefix, known, width = 0.0, np.int64(0), 31, 11
    bits = values.view(np.int32)
    while known:
        low = known - width
        sums[:] = 0.0
        for i in range(values.size):
            key = np.int64(bits[i]) & _MAGNITUDE
            if key >> known == prefix:
                sums[(key >> low) & ((1 << width) - 1)] += weights[i] if by_weight else 1.0
        digit = 0
        while digit < _DIGITS and above + sums[digit] < limit:
            above += sums[digit]
            digit += 1
        if digit == _DIGITS:
            return _NOTHING
        prefix, known, width = np.int64((prefix << width) | digit), low, 10
    return -np.int32(prefix).view(np.float32)


@kernel()
def _pick(values: Any, weights: Any, floor: float, mass: float, uniform: float) -> int:
    """The first place at which the weights of values >= floor, which sum up to `mass`, exceed uniform * mass."""
    target, total = uniform * mass, 0.0
    for i in range(values.size):
        if values[i] >= floor:
            total += weights[i]
            if total > target:
                return i
    return -1


@kernel(fastmath=_SUM)
def _mass_from(values: Any, weights: Any, floor: float) -> Any:
    total = 0.0
    for i in range(values.size):
        total += weights[i] if values[i] >= floor else 0.0
    return total


@kernel()
def _pick_any(x: Any, block_sums: Any, mass: float, uniform: float, scale: float) -> int:
    """The column drawn from a whole row."""
    target, total = uniform * mass, 0.0
    for b in range(block_sums.size):
        if total + block_sums[b] > target:
            for j in range(b * _BLOCK, min((b + 1) * _BLOCK, x.size)):
                total += _weigh(x[j], scale)
                if total > target:
                    return j
        total += block_sums[b]
    return x.size - 1


@kernel()
def _shortlist(x: Any, tops: Any, bound: float, columns: Any, values: Any) -> int:
    """Take down each x >= bound, by column; returns how many."""
    num = 0
    for b in range(tops.size):
        if tops[b] >= bound:
            for j in range(b * _BLOCK, min((b + 1) * _BLOCK, x.size)):
                columns[num], values[num] = j, x[j]
                num += 1 if x[j] >= bound else 0
    return num


@kernel()
def _draw_row(
    row: Any, peak: Any, temperature: Any, min_logit: Any, top_k: int, top_p: float, uniform: float, scale: float,
    x: Any, tops: Any, block_sums: Any, columns: Any, values: Any, weights: Any, sums: Any,
) -> int:  # fmt: skip
    size, num_blocks = x.size, tops.size
    for b in range(num_blocks):
        start, stop = b * _BLOCK, min((b + 1) * _BLOCK, size)
        _scale_block(row[start:stop], peak, temperature, x[start:stop])
        tops[b] = _largest(x[start:stop])
    bound, mass = min_logit, 0.0
    if top_k < num_blocks:
        bound = max(bound, _floor(tops, block_sums, False, np.float64(top_k), sums))
    whole = top_k >= size and min_logit == _NOTHING
    if whole:
        for b in range(num_blocks):
            block_sums[b] = _mass(x[b * _BLOCK : min((b + 1) * _BLOCK, size)], scale)
            mass += block_sums[b]
        if top_p >= 1.0:
            return _pick_any(x, block_sums, mass, uniform, scale)
        bound = np.float32(math.log(0.5 * (1.0 - top_p) * mass / (scale * size)))

    num = _shortlist(x, tops, bound, columns, values)
    values, weights = values[:num], weights[:num]
    for i in range(num):
        weights[i] = _weigh(values[i], scale)
    floor = min_logit
    if top_k < size:
        floor = max(floor, _floor(values, weights, False, np.float64(top_k), sums))
    if not whole:
        mass = _mass_from(values, weights, floor)
    if top_p < 1.0:
        floor = max(floor, _floor(values, weights, True, top_p * mass, sums))
        mass = _mass_from(values, weights, floor)
    place = _pick(values, weights, floor, mass, uniform)
    return columns[place] if place >= 0 else size - 1


@kernel(parallel=True)
def _draw(
    logits_address: int, rows: int, stride: int, size: int, peak_address: int, temperature_address: int,
    min_logit_address: int, top_k_address: int, top_p_address: int, uniform_address: int, scale: float,
    tokens_address: int, threads: int,
) -> None:  # fmt: skip
    logits = carray(float32_at(logits_address), (rows - 1) * stride + size)
    peak, temperature = carray(float32_at(peak_address), rows), carray(float32_at(temperature_address), rows)
    min_logit, top_k = carray(float32_at(min_logit_address), rows), carray(int64_at(top_k_address), rows)
    top_p, uniform = carray(float64_at(top_p_address), rows), carray(float64_at(uniform_address), rows)
    tokens = carray(int64_at(tokens_address), rows)
    num_blocks = (size + _BLOCK - 1) // _BLOCK
    for t in prange(threads):
        x, tops, block_sums = np.empty(size, np.float32), np.empty(num_blocks, np.float32), np.empty(num_blocks)
        columns, values, weights = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size)
        sums = np.empty(_DIGITS)
        for r in range(share(rows, t, threads), share(rows, t + 1, threads)):
            tokens[r] = _draw_row(
                logits[r * stride : r * stride + size], peak[r], temperature[r], min_logit[r], top_k[r], top_p[r],
                uniform[r], scale, x, tops, block_sums, columns, values, weights, sums,
            )  # fmt: skip


def draw(logits: Tensor, peak: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """See `Ops.draw`.  Raises: ValueError naming the argument."""
    rows, size = check("logits", logits, torch.float32, 2)
    for name, vector, dtype in (
        ("peak", peak, torch.float32),
        ("temperature", filters.temperature, torch.float32),
        ("min_logit", filters.min_logit, torch.float32),
        ("top_k", filters.top_k, torch.int64),
        ("top_p", filters.top_p, torch.float64),
        ("uniform", uniform, torch.float64),
    ):
        if check(name, vector, dtype, 1, contiguous=True)[0] != rows:
            raise ValueError(f"{name}: {len(vector)} entries for {rows} rows of logits")
    tokens = torch.empty(rows, dtype=torch.int64)
    if rows:
        _draw(
            logits.data_ptr(), rows, logits.stride(0), size, peak.data_ptr(), filters.temperature.data_ptr(),
            filters.min_logit.data_ptr(), filters.top_k.data_ptr(), filters.top_p.data_ptr(), uniform.data_ptr(),
            scale_of(size), tokens.data_ptr(), min(rows, numba.get_num_threads()),
        )  # fmt: skip
    return tokens
