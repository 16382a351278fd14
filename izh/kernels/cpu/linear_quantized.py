"""Linear layers with weights of 8 or 4 bits on CPU.

Owns: `quantize_linear`: weights packed for the kernel, and the kernel, for any number of rows.
Must not know: models. The arithmetic is that of `izh/kernels/quantized.py`, to the last bit.
Invariant: a row's numbers depend on that row and the weights alone; they are the same among any number of rows, on any
number of threads, and with any instruction set.

The weights are streamed in the order in which they lie, a quarter or a sixth of float32's bytes: once for few rows, and
once for each panel of rows that the second cache holds.
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
from izh.kernels.cpu.simd import HAS_HALF
from izh.kernels.cpu.simd_integer import LANES, ROWS, VECTORS, WORD_CODES, integer_tile
from izh.kernels.ops import Activation, QuantizedLinear
from izh.kernels.quantized import ACTIVATIONS, FORMS, LEAST, TOP, Form

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
def _quantize_rows(
    start: int, stop: int, x: Any, x_row: int, width: int, codes: Any, padded: int, scales: Any, group: int, sums: Any,
    num_sums: int,
) -> None:  # fmt: skip
    """Rows start .. stop - 1 of x: their whole numbers, their scales, and the sums of `num_sums` groups of each."""
    for i in range(start, stop):
        mine = codes[i * padded : (i + 1) * padded]
        scales[i] = _quantize(x[i * x_row : i * x_row + width], mine)
        for g in range(num_sums):
            total = np.int32(0)
            for code in mine[g * group : (g + 1) * group]:
                total += code
            sums[i * num_sums + g] = total


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
    start: int, stop: int, first: int, last: int, bits: int, group: int, x: Any, padded: int, group_sums: Any,
    num_sums: int, weight: Any, weight_bytes: int, scales: Any, scale_bytes: int, row_scales: Any, bias: Any, out: Any,
    outputs: int,
) -> None:  # fmt: skip
    """Rows [first, last) of the columns [start, stop), both in units of _COLUMNS, in tiles of about the same size."""
    tiles = (last - first + ROWS - 1) // ROWS
    sums = np.empty(ROWS * _COLUMNS, np.float32)
    for unit in range(start, stop):
        n, w, s = unit * _COLUMNS, unit * VECTORS * weight_bytes, unit * VECTORS * scale_bytes
        count = min(_COLUMNS, outputs - n)
        for tile in range(tiles):
            i, end = first + share(last - first, tile, tiles), first + share(last - first, tile + 1, tiles)
            at, sums_at = i * padded, i * num_sums
            if bits == 8:
                integer_tile(8, VECTORS, end - i, x, at, group_sums, sums_at, weight, w, scales, s, padded, group, sums)
            else:
                integer_tile(4, VECTORS, end - i, x, at, group_sums, sums_at, weight, w, scales, s, padded, group, sums)
            _write(end - i, count, sums, row_scales, i, n, bias, out, outputs)


@kernel(parallel=True)
def _linear(
    bits: int, group: int, padded: int, num_sums: int, weight_bytes: int, scale_bytes: int, x_address: int, rows: int,
    x_row: int, width: int, weight_address: int, scales_address: int, bias_address: int, num_biases: int,
    out_address: int, outputs: int, threads: int,
) -> None:  # fmt: skip
    """`weight_bytes` and `scale_bytes` are those of a block."""
    units = (outputs + _COLUMNS - 1) // _COLUMNS
    x = carray(float32_at(x_address), (rows - 1) * x_row + width)
    weight = carray(int8_at(weight_address), units * VECTORS * weight_bytes)
    scales = carray(int8_at(scales_address), units * VECTORS * scale_bytes)
    bias = carray(float32_at(bias_address), num_biases)
    out = carray(float32_at(out_address), rows * outputs)
    codes, row_scales = np.empty(rows * padded, np.int16), np.empty(rows, np.float32)
    group_sums = np.empty(rows * num_sums, np.float32)
    panel = max(_PANEL // padded // ROWS, 1) * ROWS
    if rows < 4 * threads:
        _quantize_rows(0, rows, x, x_row, width, codes, padded, row_scales, group, group_sums, num_sums)
    else:
        for t in prange(threads):
            start, stop = share(rows, t, threads), share(rows, t + 1, threads)
            _quantize_rows(start, stop, x, x_row, width, codes, padded, row_scales, group, group_sums, num_sums)
    for t in prange(threads):
        start, stop = share(units, t, threads), share(units, t + 1, threads)
        for first in range(0, rows, panel):
            _columns(
                start, stop, first, min(first + panel, rows), bits, group, codes, padded, group_sums, num_sums, weight,
                weight_bytes, scales, scale_bytes, row_scales, bias, out, outputs,
            )  # fmt: skip


class _QuantizedLinear:
    """See `Ops.quantize_linear`. Codes and scales lie as `simd_integer.py` wants them, filled up with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None, form: Form) -> None:
        self._form = form
        self.outputs, self.width = check("weight", weight, torch.float32, 2)
        if bias is not None and check("bias", bias, torch.float32, 1, contiguous=True) != (self.outputs,):
            raise ValueError(f"bias: {len(bias)} entries for a weight of {self.outputs} rows")
        codes, scales = form.quantize(weight)
        self._bias = bias
        num_groups, in_word = scales.shape[1], WORD_CODES[form.bits]
        blocks = -(-self.outputs // _PAD) * (_PAD // LANES)
        more = blocks * LANES - self.outputs
        codes = F.pad(codes, (0, -self.width % in_word, 0, more)).view(blocks, LANES, -1, in_word)
        if form.bits == 8:
            self._packed = codes.transpose(1, 2).contiguous()
        else:
            self._packed = _packed(codes).permute(0, 2, 3, 1).contiguous()
        if not HAS_HALF:
            scales = scales.float()
        scales = F.pad(scales, (0, 0, 0, 0, 0, more)).view(blocks, LANES, num_groups, -1)
        self._scales = scales.permute(0, 2, 3, 1).contiguous()
        self._sizes = (
            form.bits, form.group, codes.shape[2] * in_word, num_groups if form.bits == 4 else 0,
            self._packed.nbytes // blocks, self._scales.nbytes // blocks,
        )  # fmt: skip

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
                *self._sizes, x.data_ptr(), rows, x.stride(0), width, self._packed.data_ptr(), self._scales.data_ptr(),
                0 if bias is None else bias.data_ptr(), 0 if bias is None else self.outputs, out.data_ptr(),
                self.outputs, 1 if rows * self.outputs * width < PARALLEL_WORK else numba.get_num_threads(),
            )  # fmt: skip
        return ACTIVATIONS[activation](out)

    def rows(self, ids: Tensor) -> Tensor:
        return self._form.dequantize(*self._codes_and_scales(ids))

    def holds(self, weight: Tensor) -> bool:
        codes, scales = self._codes_and_scales(torch.arange(self.outputs))
        others, their_scales = self._form.quantize(weight)
        return torch.equal(codes, others) and torch.equal(scales, their_scales.to(scales.dtype))

    def _codes_and_scales(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the weight as `izh/kernels/quantized.py` has them."""
        block, lane = ids // LANES, ids % LANES
        if self._form.bits == 8:
            codes = self._packed[block, :, lane]
        else:
            codes = _unpacked(self._packed[block, ..., lane])
        return codes.flatten(1)[:, : self.width], self._scales[block, ..., lane]


_SHIFTS = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
"""From which bit on each of eight codes lies in 32 bits."""


def _packed(codes: Tensor) -> Tensor:
    """codes [..., C] int8 -> [..., C / 8] int32."""
    parts = codes.unflatten(-1, (-1, 8))
    return torch.stack([parts[..., i].int() << shift for i, shift in enumerate(_SHIFTS)]).sum(0, dtype=torch.int32)


def _unpacked(packed: Tensor) -> Tensor:
    """The inverse of `_packed`."""
    return (packed[..., None] >> _SHIFTS & 15).to(torch.int8).flatten(-2)


def quantize_linear(weight: Tensor, bias: Tensor | None, form: str) -> QuantizedLinear:
    """See `Ops.quantize_linear`. Raises: ValueError naming what is no float32 on the CPU, or does not fit."""
    return _QuantizedLinear(weight, bias, FORMS[form])
