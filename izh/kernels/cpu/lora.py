"""The ops `add_lora` and `linear_lora` on CPU: many adapters in one step.

Owns: LoraLinear; the border of their kernels: few rows run beside their base (`lora_linear.py`), many after
it (`lora_add.py`).
Must not know: adapters' names, modules, requests.
Invariant: a row's numbers do not depend on what else is in the step.

Milliseconds over all 30 layers of the demo model, rank 16, 2 cores of a Zen 5. 32 rows and 32 slots in float16, median
of 15: base alone 17.5, with 8 / 32 adapters 19.7 / 23.1, where plain reading of all their 737 MB takes 16 to 17.5.
2048 rows, best of 3: base 950, with 1 / 8 / 32 adapters in float32 1064 / 1060 / 1083.
"""

from functools import lru_cache

import numba
import torch
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.linear import PANEL, check_rows, check_weight, linear
from izh.kernels.cpu.lora_add import add_lora_rows
from izh.kernels.cpu.lora_linear import linear_lora_rows
from izh.kernels.cpu.simd import HAS_HALF
from izh.kernels.lora import AdapterRows


@lru_cache(maxsize=64)
def _checked_offsets(offsets: tuple[int, ...], parts: int, outputs: int) -> Tensor:
    """Raises ValueError when they do not cut `outputs` into `parts`."""
    if len(offsets) != parts + 1 or offsets[0] != 0 or offsets[-1] != outputs or list(offsets) != sorted(offsets):
        raise ValueError(f"offsets: {offsets} do not cut {outputs} outputs into {parts} parts")
    return torch.tensor(offsets, dtype=torch.int32)


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: tuple[int, ...], ranks: Tensor, rows: AdapterRows
) -> None:
    """See `Ops.add_lora`. Float32 on CPU; x and y may be views of wider rows, a and ranks are contiguous, b is as
    `lora_room` gives it; a and b may both be float16, which is widened as it is read.

    Modifies: y. Raises: ValueError naming the argument whose dtype, shape, layout or content does not fit; y is then
    untouched.
    """
    num_rows, width = check("x", x, torch.float32, 2)
    y_rows, outputs = check("y", y, torch.float32, 2)
    if y_rows != num_rows:
        raise ValueError(f"y: {y_rows} rows for {num_rows} of x")
    memory = _check_weights(width, outputs, a, b, offsets, ranks)
    fault = add_lora_rows(
        x.data_ptr(), num_rows, x.stride(0), width, *memory, *rows.host_memory, numba.get_num_threads(), y.data_ptr(),
        y.stride(0),
    )  # fmt: skip
    if fault >= 0:
        raise _error(fault, num_rows, a, ranks, rows)


class LoraLinear:
    """See `Ops.linear_lora`, and `add_lora` for the arguments. Of at most PANEL rows base and corrections are one
    kernel's, with the bits of one after the other.

    What does not change is checked here, once: a step calls each layer of a model, and looking at six tensors takes
    longer than some of these layers' corrections.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, offsets: tuple[int, ...], ranks: Tensor
    ) -> None:
        """Raises ValueError naming the argument whose dtype, shape, layout or content does not fit."""
        width, outputs, bias_address, num_biases = check_weight(weight, bias)
        self.memory = (
            width, weight.data_ptr(), weight.stride(0), bias_address, num_biases,
            *_check_weights(width, outputs, a, b, offsets, ranks),
        )  # fmt: skip
        self._outputs = outputs
        self._base = (weight, bias)
        self._lora = (a, b, offsets, ranks)

    def __call__(self, x: Tensor, rows: AdapterRows) -> Tensor:
        """Raises ValueError naming the argument that does not fit, a rank for which there is no room included."""
        num_rows = x.shape[0]
        if not 0 < num_rows <= PANEL:
            y = linear(x, *self._base)
            add_lora(y, x, *self._lora, rows)
            return y
        check_rows(x, self._base[0])
        y = torch.empty((num_rows, self._outputs))
        fault = linear_lora_rows(
            x.data_ptr(), num_rows, x.stride(0), *self.memory, *rows.host_memory, numba.get_num_threads(),
            y.data_ptr(), self._outputs,
        )  # fmt: skip
        if fault >= 0:
            a, _, _, ranks = self._lora
            raise _error(fault, num_rows, a, ranks, rows)
        return y


def _check_weights(
    width: int, outputs: int, a: Tensor, b: Tensor, offsets: tuple[int, ...], ranks: Tensor
) -> tuple[int, ...]:
    """What the kernel reads of them, as its arguments from `is_half` to `ranks_address`. Raises ValueError."""
    dtype = torch.float16 if HAS_HALF and a.dtype is torch.float16 else torch.float32
    num_slots, parts, max_rank, a_width = check("a", a, dtype, 4, contiguous=True)
    if a_width != width:
        raise ValueError(f"a: width {a_width} for rows of x of {width}")
    if b.shape != (num_slots, outputs, max_rank) or b.dtype is not a.dtype or not b.is_cpu:
        needed = f"{a.dtype} {(num_slots, outputs, max_rank)}"
        raise ValueError(f"b: {b.dtype} {tuple(b.shape)} on {b.device}; needed is {needed}")
    b_row = b.stride(2)
    if b.stride() != (max_rank * b_row, 1, b_row) or b_row < outputs:
        raise ValueError(f"b: strides {b.stride()}; it must lie by ranks, as `lora_room` gives it")
    if check("ranks", ranks, torch.int32, 2, contiguous=True) != (num_slots, parts):
        raise ValueError(f"ranks: shape {tuple(ranks.shape)} for {num_slots} slots of {parts} parts")
    return (
        a.dtype is torch.float16, a.data_ptr(), num_slots, parts, max_rank, b.data_ptr(), b_row, outputs,
        _checked_offsets(offsets, parts, outputs).data_ptr(), ranks.data_ptr(),
    )  # fmt: skip


def _error(fault: int, num_rows: int, a: Tensor, ranks: Tensor, rows: AdapterRows) -> ValueError:
    """What is wrong with the group that the kernel found."""
    slot, _, stop = rows.groups[fault]
    if slot >= a.shape[0]:
        return ValueError(f"rows: slot {slot} of a bank of {a.shape[0]}")
    if (last := int(rows.order[stop - 1])) >= num_rows:
        return ValueError(f"rows: row {last} of a step of {num_rows}")
    return ValueError(f"ranks: {ranks[slot].tolist()} in slot {slot}, whose room is for 0 to {a.shape[2]}")
