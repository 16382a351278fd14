"""Linear layers on CPU, by a kernel that streams the weights once for up to PANEL rows.

Owns: the kernel, for any number of rows, and its pieces, which `lora_linear.py` runs among its own.
Must not know: models, checkpoints. The weight is read as it lies: there is no second copy of it in another order.
Invariant: a row's numbers depend on that row and the weights alone; they are bit for bit the same among any number of
rows.

Four weight rows at a time, eight with AVX-512, meet the rows of x three by three. Each of these passes also fetches its
part of the next ones, so that memory is busy while the arithmetic runs: without that the two add up, and 8 rows take
twice as long. Wide rows are met in parts, of which the first cache keeps the weights for all passes (1.4x at 32 rows).

Microseconds, kernel / F.linear, other weights in every call, median of 7 on 2 cores of a Zen 5 held to AVX2. With
AVX-512 up to 8 rows take as long, which is the memory's time; 32 take 93 of 960 x 576, 280 of 3072 x 576, 153 of
576 x 1536:
rows           1           4           8            16           32           64
960 x 576      45 / 127    54 / 185    61 / 168     89 / 207     156 / 282    297 / 438
3072 x 576     141 / 409   167 / 603   181 / 470    264 / 578    482 / 825    927 / 1319
576 x 1536     69 / 164    91 / 263    91 / 221     140 / 282    256 / 418    467 / 654
49152 x 576    1920 / 6548 2322 / 9157 2844 / 10725 4200 / 12942 7727 / 18311 14838 / 26598
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, prange
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, kernel, share
from izh.kernels.cpu.fetch import DONE, fetch_some
from izh.kernels.cpu.simd import LANES, LINE
from izh.kernels.cpu.simd import dot_tile_ahead as tile

PANEL = 66  # rows that meet the weights at once, three by three
_KEPT = 131072  # floats of the weight that stay in the second cache while panel after panel meets them: half of 1 MiB
PARALLEL_WORK = 65536  # rows x outputs x width below which one thread does all: a few microseconds on one core

COLUMNS = LANES // 2  # of a tile, whose sums stay in registers: 3 rows x 4 of the 16 of AVX2, x 8 of the 32 of AVX-512
DEPTH = 6144 // COLUMNS  # of a part of a row: a tile's weights of it, 24 KiB, stay in the first cache
# Cache lines of the next tile's weights that are asked for at each vector: all that one pass has to. More passes so ask
# again, as they must: while too many are on their way the processor drops requests.
_LINES = COLUMNS * LANES // LINE


@kernel()
def dot_pass(
    i: int, d: int, stop: int, x: Any, rows: int, x_row: int, weight: Any, at: int, stride: int, whole: int,
    carried: Any, out: Any, out_at: int, out_row: int, ahead: int, step: int,
) -> None:  # fmt: skip
    """The part [d, stop) of out[r, j] = x[r, : whole] . weight row at `at + j * stride`, r in i .. i + 2 (below `rows`)
    and j < COLUMNS. The parts come one after the other, and `carried` holds the sums until the last. Fetches `step`
    floats from `ahead` on for each vector."""
    to, x_at, c_at = out_at + i * out_row, i * x_row + d, i * COLUMNS * LANES
    first, last, at, width = d == 0, stop == whole, at + d, stop - d
    if rows - i >= 3:
        tile(
            x, x_at, x_row, weight, at, stride, width, first, last, carried, c_at, out, to, out_row, ahead, step, 3,
            COLUMNS, _LINES,
        )  # fmt: skip
    elif rows - i == 2:
        tile(
            x, x_at, x_row, weight, at, stride, width, first, last, carried, c_at, out, to, out_row, ahead, step, 2,
            COLUMNS, _LINES,
        )  # fmt: skip
    else:
        tile(
            x, x_at, x_row, weight, at, stride, width, first, last, carried, c_at, out, to, out_row, ahead, step, 1,
            COLUMNS, _LINES,
        )  # fmt: skip


@kernel(inline=True)
def _parts_of(whole: int, passes: int) -> int:
    """In how many parts `dot_pass` takes a width: one where no second pass would find a tile's weights in the cache."""
    return 1 if passes == 1 else max((whole + DEPTH - 1) // DEPTH, 1)


@kernel()
def carried_room(rows: int, width: int) -> Any:
    """The `carried` of `dot_pass`: the sums of all rows' tiles, vectors that are not yet added up."""
    passes = (rows + 2) // 3
    return np.empty(passes * 3 * COLUMNS * LANES if _parts_of(width, passes) > 1 else 0, np.float32)


@kernel(inline=True)
def tile_outputs(
    n: int, x: Any, rows: int, x_row: int, weight: Any, weight_row: int, width: int, bias: Any, carried: Any, out: Any,
    out_row: int, pieces: Any, place: Any, due: int,
) -> None:  # fmt: skip
    """Columns n .. n + COLUMNS - 1 of the result. Each pass fetches its share of the weights of the next ones, and
    unless `pieces` is None of what those still lack until `due` steps are done (see `fetch.py`)."""
    whole, passes, at = width - width % LANES, (rows + 2) // 3, n * weight_row
    parts = _parts_of(whole, passes)
    depth = (whole // LANES + parts - 1) // parts * LANES
    ahead, step = at + COLUMNS * weight_row, (COLUMNS * LANES + passes - 1) // passes
    if pieces is not None:
        each = (due - place[DONE] + passes * parts - 1) // (passes * parts)
    for part in range(parts):
        d, stop = part * depth, min((part + 1) * depth, whole)
        for i in range(0, rows, 3):
            dot_pass(i, d, stop, x, rows, x_row, weight, at, weight_row, whole, carried, out, n, out_row, ahead, step)
            ahead += COLUMNS * (stop - d) // passes
            if pieces is not None:
                fetch_some(pieces, place, each, due)
    if whole < width or bias.size:
        finish(n, COLUMNS, x, rows, x_row, weight, at, weight_row, whole, width, out, n, out_row, bias, out, out_row)


@kernel()
def finish(
    n: int, count: int, x: Any, rows: int, x_row: int, weight: Any, at: int, stride: int, whole: int, width: int,
    sums: Any, sums_at: int, sums_row: int, bias: Any, out: Any, out_row: int,
) -> None:  # fmt: skip
    """Columns n .. n + count - 1 of the result, from their sums over `whole`; a bias of size 0 is none."""
    for i in range(rows):
        for j in range(count):
            total = sums[sums_at + i * sums_row + j]
            for d in range(whole, width):
                total += x[i * x_row + d] * weight[at + j * stride + d]
            out[i * out_row + n + j] = total + bias[n + j] if bias.size else total


@kernel()
def _outputs(
    start: int, stop: int, x: Any, rows: int, x_row: int, weight: Any, weight_row: int, width: int, bias: Any, out: Any,
    outputs: int,
) -> None:  # fmt: skip
    """Columns [start, stop) of the result."""
    carried, n = carried_room(rows, width), start
    while n + COLUMNS <= stop:
        tile_outputs(n, x, rows, x_row, weight, weight_row, width, bias, carried, out, outputs, None, None, 0)
        n += COLUMNS
    last_outputs(n, stop, x, rows, x_row, weight, weight_row, width, bias, out, outputs)


@kernel()
def last_outputs(
    n: int, stop: int, x: Any, rows: int, x_row: int, weight: Any, weight_row: int, width: int, bias: Any, out: Any,
    out_row: int,
) -> None:  # fmt: skip
    """The last columns, less than a tile's: there are not so many weight rows to read, so each is taken as if it were
    all of them."""
    if n == stop:
        return
    sums, whole = np.empty(rows * COLUMNS, np.float32), width - width % LANES
    while n < stop:
        at = n * weight_row
        for i in range(0, rows, 3):
            dot_pass(i, 0, whole, x, rows, x_row, weight, at, 0, whole, sums, sums, 0, COLUMNS, at, 0)
        finish(n, 1, x, rows, x_row, weight, at, 0, whole, width, sums, 0, COLUMNS, bias, out, out_row)
        n += 1


@kernel()
def _panels(
    start: int, stop: int, x: Any, rows: int, x_row: int, weight: Any, weight_row: int, width: int, bias: Any, out: Any,
    outputs: int,
) -> None:  # fmt: skip
    """Columns [start, stop) of the result, a panel of rows at a time: so many columns at once that the second cache
    keeps their weights from one panel to the next."""
    step = outputs if rows <= PANEL else max(_KEPT // width // COLUMNS, 1) * COLUMNS
    for n in range(start, stop, step):
        for first in range(0, rows, PANEL):
            _outputs(
                n, min(n + step, stop), x[first * x_row :], min(PANEL, rows - first), x_row, weight, weight_row, width,
                bias, out[first * outputs :], outputs,
            )  # fmt: skip


@kernel(parallel=True)
def _linear(
    x_address: int, rows: int, x_row: int, weight_address: int, weight_row: int, outputs: int, width: int,
    bias_address: int, num_biases: int, out_address: int, threads: int,
) -> None:  # fmt: skip
    x = carray(float32_at(x_address), rows * x_row + width)
    weight = carray(float32_at(weight_address), outputs * weight_row + width)
    bias = carray(float32_at(bias_address), num_biases)
    out = carray(float32_at(out_address), rows * outputs)
    if threads == 1:
        _panels(np.int64(0), outputs, x, rows, x_row, weight, weight_row, width, bias, out, outputs)
    else:
        tiles = (outputs + COLUMNS - 1) // COLUMNS
        for t in prange(threads):
            start, stop = share(tiles, t, threads) * COLUMNS, min(share(tiles, t + 1, threads) * COLUMNS, outputs)
            _panels(start, stop, x, rows, x_row, weight, weight_row, width, bias, out, outputs)


@kernel()
def linear_at(fixed: Any, x_address: int, rows: int, x_row: int, out_address: int, threads: int) -> None:
    """`linear` for another kernel: `fixed` is an array of what `fixed_arguments` says of the weight and the bias."""
    outputs, width = fixed[0], fixed[1]
    _linear(
        x_address, rows, x_row, fixed[2], fixed[3], outputs, width, fixed[4], fixed[5], out_address,
        1 if rows * outputs * width < PARALLEL_WORK else threads,
    )  # fmt: skip


def fixed_arguments(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Outputs, width, and what else `linear_at` has to know of a layer. Raises: ValueError naming the argument."""
    width, outputs, *of_bias = check_weight(weight, bias)
    return outputs, width, weight.data_ptr(), weight.stride(0), *of_bias


def check_weight(weight: Tensor, bias: Tensor | None) -> tuple[int, int, int, int]:
    """(width, outputs, the bias's address, its entries) of what a kernel can take. Raises: ValueError naming the
    argument."""
    outputs, width = check("weight", weight, torch.float32, 2)
    bias_address = num_biases = 0
    if bias is not None:
        (num_biases,) = check("bias", bias, torch.float32, 1, contiguous=True)
        if num_biases != outputs:
            raise ValueError(f"bias: {num_biases} entries for a weight of {outputs} rows")
        bias_address = bias.data_ptr()
    return width, outputs, bias_address, num_biases


def check_rows(x: Tensor, weight: Tensor) -> None:
    """Raises ValueError for rows that a kernel cannot take, or that are not the weight's."""
    _, width = check("x", x, torch.float32, 2)
    if weight.shape[1] != width:
        raise ValueError(f"weight: shape {tuple(weight.shape)} for rows of x {tuple(x.shape)}")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `Ops.linear`; float32 is the kernel's, all else torch's.

    Raises: ValueError naming the argument.
    """
    rows = x.shape[0]
    if weight.dtype is not torch.float32:
        return F.linear(x, weight, bias)
    width, outputs, bias_address, num_biases = check_weight(weight, bias)
    check_rows(x, weight)
    out = torch.empty((rows, outputs))
    _linear(
        x.data_ptr(), rows, x.stride(0), weight.data_ptr(), weight.stride(0), outputs, width, bias_address, num_biases,
        out.data_ptr(), 1 if rows * outputs * width < PARALLEL_WORK else numba.get_num_threads(),
    )  # fmt: skip
    return out


def linear_up_to(max_rows: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`Ops.linear` by the kernel for at most `max_rows` rows, by torch for more."""

    def either(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias) if len(x) <= max_rows else F.linear(x, weight, bias)

    return either
