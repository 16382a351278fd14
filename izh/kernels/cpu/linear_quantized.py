"""Linear layers with weights of 8 or 4 bits on CPU.

Owns: `quantize_linear`: weights packed for the kernel, and the kernel, for any number of rows.
Must not know: models. The arithmetic is that of `izh/kernels/quantized.py`, to the last bit.
Invariant: a row's numbers depend on that row and the weights alone; they are the same among any number of rows, on any
number of threads, and with any instruction set.

The weights are streamed in the order in which they lie, a quarter or a sixth of float32's bytes: once for few rows, and
once for each panel of rows that the second cache holds. Gates and what goes through them, if other kernels ask for it,
meet before either has left that cache.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, prange
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, int8_at, kernel, share
from izh.kernels.cpu.elementwise import gate_block
from izh.kernels.cpu.quantize_rows import quantize_rows
from izh.kernels.cpu.simd import HAS_HALF
from izh.kernels.cpu.simd_integer import CODE, LANES, OFFSET, ORDER, ROWS, VECTORS, WORD_CODES, integer_tile
from izh.kernels.ops import Activation, QuantizedLinear
from izh.kernels.quantized import ACTIVATIONS, FORMS, GROUP, Form

PARALLEL_WORK = 131072  # rows x outputs x width below which one thread does all
PANEL_BYTES = 131072  # of x's whole numbers: half of a small second cache
PART_BYTES = 24576  # of a unit's weights: half of a first cache
NO_GATE, SILU, GELU_TANH = range(3)
_COLUMNS = VECTORS * LANES
_PAD = 2 * LANES  # columns are filled up to a multiple of it, whatever VECTORS is
_CODE_BYTES = np.dtype(CODE).itemsize
_OFFSET_8 = OFFSET[8]


class _Packed(NamedTuple):
    """How weights lie: `weight_bytes` and `scale_bytes` are those of a block."""

    bits: int
    digits: int
    groups: int
    weight_bytes: int
    scale_bytes: int


class _Panel(NamedTuple):
    """Rows [first, first + size) of `rows`, and how units of columns take them: in `tiles` of `tile_rows` or, the first
    `longer` of them, one more; `part_groups` groups at a time."""

    rows: int
    first: int
    size: int
    tiles: int
    tile_rows: int
    longer: int
    part_groups: int


@kernel()
def _panel(form: Any, rows: int, first: int, last: int) -> Any:
    """Where several tiles share the weights of a unit, they take as much of them at a time as the first cache holds."""
    size, part_groups = last - first, form.groups
    tiles = (size + ROWS - 1) // ROWS
    if tiles > 1:
        parts = (VECTORS * form.weight_bytes + PART_BYTES - 1) // PART_BYTES
        part_groups = (form.groups + parts - 1) // parts
    return _Panel(rows, first, size, tiles, size // tiles, size % tiles, part_groups)


@kernel()
def _columns(
    start: int, stop: int, gate: int, form: Any, panel: Any, x: Any, row_scales: Any, row_sums: Any, weight: Any,
    scales: Any, bias: Any, carried: Any, result: Any, out: Any, outputs: int,
) -> None:  # fmt: skip
    """The panel's rows of the units [start, stop) of columns. The first digits' sums come first, and what the second
    ones give is added; `carried` [panel.size, _COLUMNS] has the sums from one part of the groups to the next.

    Without a gate a unit is _COLUMNS neighbours, and `result` is `out`. With one it is LANES columns of what comes
    through: a block of gates, and that of what goes through them, half the outputs further on; `result` is room for
    both [panel.size, 2 * LANES].
    """
    step, distance, num_blocks = VECTORS, 1, VECTORS  # of a unit's blocks
    if gate != NO_GATE:
        step, distance, num_blocks = 1, outputs // 2 // LANES, 2
    group_bytes = form.weight_bytes // form.groups
    for unit in range(start, stop):
        for b in range(0, num_blocks, VECTORS):
            block = unit * step + b * distance
            n, row, count = panel.first * outputs + block * LANES, outputs, min(_COLUMNS, outputs - block * LANES)
            if gate != NO_GATE:
                n, row, count = b * LANES, 2 * LANES, _COLUMNS
            for digit in range(form.digits):
                first = (digit * panel.rows + panel.first) * form.groups
                for g in range(0, form.groups, panel.part_groups):
                    end = min(g + panel.part_groups, form.groups)
                    ahead = end * group_bytes if end < form.groups else step * form.weight_bytes
                    i = 0
                    for tile in range(panel.tiles):
                        size = panel.tile_rows + (1 if tile < panel.longer else 0)
                        at, to = first + i * form.groups, n + i * row
                        added, added_at, added_row, added_distance = bias, block * LANES, 0, distance * LANES
                        if digit:
                            added, added_at, added_row, added_distance = result, to, row, LANES
                        integer_tile(
                            form.bits, VECTORS, size, x, at * GROUP, row_scales, row_sums, at, form.groups, weight,
                            block * form.weight_bytes, distance * form.weight_bytes, ahead - g * group_bytes, scales,
                            block * form.scale_bytes, distance * form.scale_bytes, g, end, carried, i * _COLUMNS, added,
                            added_at, added_row, added_distance, result, to, row, count,
                        )  # fmt: skip
                        i += size
        if gate != NO_GATE:
            to, width = panel.first * (outputs // 2) + unit * LANES, outputs // 2
            gate_block(0, panel.size, result, 2 * LANES, LANES, LANES, gate == GELU_TANH, out, to, width)


@kernel(parallel=True)
def _linear(
    bits: int, digits: int, groups: int, weight_bytes: int, scale_bytes: int, x_address: int, rows: int, x_row: int,
    width: int, weight_address: int, scales_address: int, bias_address: int, out_address: int, outputs: int,
    gate: int, threads: int,
) -> None:  # fmt: skip
    """The first five are a `_Packed`, `gate` is one of NO_GATE, SILU, GELU_TANH."""
    form = _Packed(bits, digits, groups, weight_bytes, scale_bytes)
    blocks = (outputs + _PAD - 1) // _PAD * (_PAD // LANES)
    x = carray(float32_at(x_address), (rows - 1) * x_row + width)
    weight = carray(int8_at(weight_address), blocks * weight_bytes)
    scales = carray(int8_at(scales_address), blocks * scale_bytes)
    bias = carray(float32_at(bias_address), outputs)
    out = carray(float32_at(out_address), rows * outputs if gate == NO_GATE else rows * (outputs // 2))
    num = digits * rows * groups
    codes, row_scales, row_sums = np.empty(num * GROUP, CODE), np.empty(num, np.float32), np.empty(num, np.int32)
    most = max(PANEL_BYTES // (digits * groups * GROUP * _CODE_BYTES) // ROWS, 1) * ROWS
    times = -_OFFSET_8 if bits == 8 else 1
    if rows < 4 * threads:
        quantize_rows(0, rows, x, x_row, width, groups, times, digits, rows, codes, row_scales, row_sums)
    else:
        for t in prange(threads):
            start, stop = share(rows, t, threads), share(rows, t + 1, threads)
            quantize_rows(start, stop, x, x_row, width, groups, times, digits, rows, codes, row_scales, row_sums)
    units = (outputs + _COLUMNS - 1) // _COLUMNS if gate == NO_GATE else outputs // 2 // LANES
    for t in prange(threads):
        start, stop = share(units, t, threads), share(units, t + 1, threads)
        for first in range(0, rows, most):
            panel = _panel(form, rows, first, min(first + most, rows))
            carried = np.empty(panel.size * _COLUMNS, np.float32)
            if gate == NO_GATE:
                _columns(
                    start, stop, gate, form, panel, codes, row_scales, row_sums, weight, scales, bias, carried, out,
                    out, outputs,
                )  # fmt: skip
            else:
                both = np.empty(panel.size * 2 * LANES, np.float32)
                _columns(
                    start, stop, gate, form, panel, codes, row_scales, row_sums, weight, scales, bias, carried, both,
                    out, outputs,
                )  # fmt: skip


@kernel()
def can_gate(outputs: int) -> bool:
    """Whether a layer of gates and as many ups can be multiplied and gated at once."""
    return outputs % (2 * LANES) == 0


@kernel()
def linear_at(fixed: Any, x_address: int, rows: int, x_row: int, out_address: int, gate: int, threads: int) -> None:
    """A layer's product for another kernel: `fixed` is an array of its `fixed_arguments`. With a gate, which
    `can_gate` must allow, the result is half as wide."""
    outputs, width = fixed[0], fixed[1]
    _linear(
        fixed[2], fixed[3], fixed[4], fixed[5], fixed[6], x_address, rows, x_row, width, fixed[7], fixed[8], fixed[9],
        out_address, outputs, gate, 1 if rows * outputs * width < PARALLEL_WORK else threads,
    )  # fmt: skip


class PackedLinear:
    """See `Ops.quantize_linear`. Codes and scales lie as `simd_integer.py` wants them, filled up with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None, form: Form) -> None:
        self._form = form
        self.outputs, self.width = check("weight", weight, torch.float32, 2)
        if bias is not None and check("bias", bias, torch.float32, 1, contiguous=True) != (self.outputs,):
            raise ValueError(f"bias: {len(bias)} entries for a weight of {self.outputs} rows")
        codes, scales = form.quantize(weight)
        groups = scales.shape[1]
        blocks = -(-self.outputs // _PAD) * (_PAD // LANES)
        more = blocks * LANES - self.outputs
        self._bias = weight.new_zeros(self.outputs) if bias is None else bias.detach()
        codes = F.pad(codes, (0, groups * GROUP - self.width, 0, more)).view(blocks, LANES, -1, WORD_CODES[form.bits])
        self._packed = _packed(codes, form.bits).transpose(1, 2).contiguous()
        if not HAS_HALF:
            scales = scales.float()
        scales = F.pad(scales, (0, 0, 0, 0, 0, more)).view(blocks, LANES, groups, -1)
        self._scales = scales.permute(0, 2, 3, 1).contiguous()
        self._sizes = (
            form.bits, form.digits, groups, self._packed.nbytes // blocks, self._scales.nbytes // blocks,
        )  # fmt: skip

    @property
    def fixed_arguments(self) -> tuple[int, ...]:
        """Outputs, width, and what else `linear_at` has to know of the layer."""
        addresses = (self._packed.data_ptr(), self._scales.data_ptr(), self._bias.data_ptr())
        return (self.outputs, self.width, *self._sizes, *addresses)

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor, activation: Activation = "none") -> Tensor:
        rows, width = check("x", x, torch.float32, 2)
        if width != self.width:
            raise ValueError(f"x: rows of {width} for a weight of {self.width}")
        out = torch.empty((rows, self.outputs))
        if rows:
            _linear(
                *self._sizes, x.data_ptr(), rows, x.stride(0), width, self._packed.data_ptr(), self._scales.data_ptr(),
                self._bias.data_ptr(), out.data_ptr(), self.outputs, NO_GATE,
                1 if rows * self.outputs * width < PARALLEL_WORK else numba.get_num_threads(),
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
        codes = _unpacked(self._packed[block, :, lane], self._form.bits)
        return codes[:, : self.width], self._scales[block, ..., lane]


def _shifts(bits: int) -> Tensor:
    """From which bit on each of a word's codes lies in it."""
    places = torch.tensor([8 * ORDER.index(code) for code in range(4)])
    return torch.cat([places + at for at in range(0, 8, bits)]).int()


def _packed(codes: Tensor, bits: int) -> Tensor:
    """codes [..., codes of a word] int8 -> [...] int32, as `integer_tile` takes them."""
    parts = (codes.int() + OFFSET[bits]) << _shifts(bits)
    return parts.sum(-1, dtype=torch.int32)  # no two have a bit in common


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_packed`, words side by side: [..., W] int32 -> [..., W * codes of a word] int8."""
    return ((packed[..., None] >> _shifts(bits) & (2**bits - 1)) - OFFSET[bits]).to(torch.int8).flatten(-2)


def quantize_linear(weight: Tensor, bias: Tensor | None, form: str) -> QuantizedLinear:
    """See `Ops.quantize_linear`. Raises: ValueError naming what is no float32 on the CPU, or does not fit."""
    return PackedLinear(weight, bias, FORMS[form])
