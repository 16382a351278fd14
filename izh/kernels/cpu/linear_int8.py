"""Linear layers with weights of 8 bits on CPU.

Owns: `quantize_linear`: weights packed for the kernel, and the kernel, for any number of rows.
Must not know: models. The arithmetic is that of `izh/kernels/int8.py`, to the last bit.
Invariant: a row's numbers depend on that row and the weights alone; they are the same among any number of rows, on any
number of threads, and with any instruction set.

The weights are streamed in the order in which they lie, a quarter of float32's bytes: once for few rows, and once for
each panel of rows that the second cache holds.
"""

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, prange
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, int8_at, kernel, share
from izh.kernels.cpu.simd_int8 import LANES, ROWS, VECTORS, integer_tile
from izh.kernels.int8 import ACTIVATIONS, GROUP, LEAST, TOP, dequantize, quantize_weight
from izh.kernels.ops import Activation, QuantizedLinear

PARALLEL_WORK = 131072  # rows x outputs x width below which one thread does all
_PANEL = 65536  # 16-bit numbers of x in a panel: half of a small second cache
_COLUMNS = VECTORS * LANES
_PAD = 2 * LANES  # columns are filled up to a multiple of it, whatever VECTORS is
_LEAST, _TOP, _UNIT = np.float32(LEAST), np.float32(TOP), np.float32(1 / TOP)
_ROUND = np.float32(1.5 * 2**23)  # added and subtracted again it rounds to a whole number, ties to even


# Loops walk slices of their own: an index with an offset may be negative, and is then not made vector code.
@kernel(fastmath={"nnan", "nsz", "reassoc"})
def _largest(row: Any) -> Any:
    """The largest magnitude of a row; anything when one of them is not a number."""
    largest = np.float32(0.0)
    for d in range(row.size):
        largest = max(largest, abs(row[d]))
    return largest


@kernel()
def _quantize(row: Any, codes: Any) -> Any:
    """Fill `codes`, as long as the row or one longer, with the row's whole numbers and zeros; returns its scale."""
    largest = max(_largest(row), _LEAST)
    factor = _TOP / largest
    num_nan = 0
    for d in range(row.size):
        if row[d] != row[d]:
            num_nan += 1
    for d in range(row.size):
        codes[d] = np.int16(np.int32((row[d] * factor + _ROUND) - _ROUND))
    codes[row.size :] = 0
    return largest * _UNIT if num_nan == 0 and largest < np.inf else np.float32(np.nan)


@kernel()
def _tile(
    left: int, x: Any, at: int, width: int, weight: Any, weight_at: int, scales: Any, scales_at: int, sums: Any
) -> int:
    """The sums of as many of `left` rows as one tile takes, and how many those are: tiles of about the same size."""
    tiles = (left + ROWS - 1) // ROWS
    size = (left + tiles - 1) // tiles
    if size == 6:
        integer_tile(x, at, weight, weight_at, scales, scales_at, width, GROUP, sums, 6, VECTORS)
    elif size == 5:
        integer_tile(x, at, weight, weight_at, scales, scales_at, width, GROUP, sums, 5, VECTORS)
    elif size == 4:
        integer_tile(x, at, weight, weight_at, scales, scales_at, width, GROUP, sums, 4, VECTORS)
    elif size == 3:
        integer_tile(x, at, weight, weight_at, scales, scales_at, width, GROUP, sums, 3, VECTORS)
    elif size == 2:
        integer_tile(x, at, weight, weight_at, scales, scales_at, width, GROUP, sums, 2, VECTORS)
    else:
        integer_tile(x, at, weight, weight_at, scales, scales_at, width, GROUP, sums, 1, VECTORS)
    return size


@kernel()
def _write(
    size: int, count: int, sums: Any, row_scales: Any, first: int, n: int, bias: Any, out: Any, outputs: int
) -> None:  # fmt: skip
    """Columns n .. n + count - 1 of rows first .. first + size - 1, from their sums; a bias of size 0 is none."""
    for i in range(size):
        scale, start = row_scales[first + i], (first + i) * outputs + n
        to, row = out[start : start + count], sums[i * _COLUMNS : i * _COLUMNS + count]
        if bias.size:
            added = bias[n : n + count]
            for j in range(count):
                to[j] = row[j] * scale + added[j]
        else:
            for j in range(count):
                to[j] = row[j] * scale


@kernel()
def _columns(
    start: int, stop: int, first: int, last: int, x: Any, padded: int, weight: Any, scales: Any, row_scales: Any,
    bias: Any, out: Any, outputs: int,
) -> None:  # fmt: skip
    """Rows [first, last) of the columns [start, stop), both in units of _COLUMNS."""
    size_of = _COLUMNS * padded
    num_scales = (padded + GROUP - 1) // GROUP * _COLUMNS
    sums = np.empty(ROWS * _COLUMNS, np.float32)
    for unit in range(start, stop):
        n = unit * _COLUMNS
        count = min(_COLUMNS, outputs - n)
        i = first
        while i < last:
            size = _tile(last - i, x, i * padded, padded, weight, unit * size_of, scales, unit * num_scales, sums)
            _write(size, count, sums, row_scales, i, n, bias, out, outputs)
            i += size


@kernel(parallel=True)
def _linear(
    x_address: int, rows: int, x_row: int, width: int, weight_address: int, scales_address: int, bias_address: int,
    num_biases: int, out_address: int, outputs: int, threads: int,
) -> None:  # fmt: skip
    padded = width + width % 2
    units = (outputs + _COLUMNS - 1) // _COLUMNS
    x = carray(float32_at(x_address), rows * x_row + width)
    weight = carray(int8_at(weight_address), units * _COLUMNS * padded)
    scales = carray(float32_at(scales_address), units * _COLUMNS * ((width + GROUP - 1) // GROUP))
    bias = carray(float32_at(bias_address), num_biases)
    out = carray(float32_at(out_address), rows * outputs)
    codes, row_scales = np.empty(rows * padded, np.int16), np.empty(rows, np.float32)
    panel = max(_PANEL // padded // ROWS, 1) * ROWS
    if threads == 1 or rows < 4 * threads:
        for i in range(rows):
            row_scales[i] = _quantize(x[i * x_row : i * x_row + width], codes[i * padded : (i + 1) * padded])
    else:
        for t in prange(threads):
            for i in range(share(rows, t, threads), share(rows, t + 1, threads)):
                row_scales[i] = _quantize(x[i * x_row : i * x_row + width], codes[i * padded : (i + 1) * padded])
    for t in prange(threads):
        start, stop = share(units, t, threads), share(units, t + 1, threads)
        for first in range(0, rows, panel):
            last = min(first + panel, rows)
            _columns(start, stop, first, last, codes, padded, weight, scales, row_scales, bias, out, outputs)


class _Int8Linear:
    """See `Ops.quantize_linear`. Codes lie as `simd_int8.py` wants them, filled up with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.width = check("weight", weight, torch.float32, 2)
        if bias is not None and check("bias", bias, torch.float32, 1, contiguous=True) != (self.outputs,):
            raise ValueError(f"bias: {len(bias)} entries for a weight of {self.outputs} rows")
        codes, scales = quantize_weight(weight)
        self._bias = bias
        pairs, blocks = (self.width + 1) // 2, -(-self.outputs // _PAD) * (_PAD // LANES)
        more = blocks * LANES - self.outputs
        codes, scales = F.pad(codes, (0, self.width % 2, 0, more)), F.pad(scales, (0, 0, 0, more))
        self._packed = codes.view(blocks, LANES, pairs, 2).transpose(1, 2).contiguous()
        self._scales = scales.view(blocks, LANES, -1).transpose(1, 2).contiguous()

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor, activation: Activation = "none") -> Tensor:
        rows, width = check("x", x, torch.float32, 2)
        if width != self.width:
            raise ValueError(f"x: rows of {width} for a weight of {self.width}")
        out = torch.empty((rows, self.outputs))
        if rows:
            bias = self._bias
            _linear(
                x.data_ptr(), rows, x.stride(0), width, self._packed.data_ptr(), self._scales.data_ptr(),
                0 if bias is None else bias.data_ptr(), 0 if bias is None else self.outputs, out.data_ptr(),
                self.outputs, 1 if rows * self.outputs * width < PARALLEL_WORK else numba.get_num_threads(),
            )  # fmt: skip
        return ACTIVATIONS[activation](out)

    def rows(self, ids: Tensor) -> Tensor:
        return dequantize(*self._codes_and_scales(ids))

    def holds(self, weight: Tensor) -> bool:
        mine = self._codes_and_scales(torch.arange(self.outputs))
        return all(map(torch.equal, mine, quantize_weight(weight)))

    def _codes_and_scales(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the weight as `izh/kernels/int8.py` has them."""
        block, lane = ids // LANES, ids % LANES
        return self._packed[block, :, lane].flatten(1)[:, : self.width], self._scales[block, :, lane]


def quantize_linear(weight: Tensor, bias: Tensor | None) -> QuantizedLinear:
    """See `Ops.quantize_linear`. Raises: ValueError naming what is no float32 on the CPU, or does not fit."""
    return _Int8Linear(weight, bias)
