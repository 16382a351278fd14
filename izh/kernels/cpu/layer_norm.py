"""Layer norm on CPU, with the addition that comes before it.

Must not know: models.
Invariant: a row's numbers do not depend on how many rows there are or which thread takes it.
"""

from typing import Any

import numba
import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, kernel, share

PARALLEL_FLOATS = 32768  # below this, starting threads costs more than the work
_SUM = {"nnan", "nsz", "reassoc", "contract"}


@kernel(fastmath=_SUM)
def _rows(
    start: int, stop: int, x: Any, x_row: int, residual: Any, residual_row: int, weight: Any, bias: Any, eps: float,
    out: Any,
) -> None:  # fmt: skip
    """Rows [start, stop). A residual of size 0 is none, else the sum is left there; a bias of size 0 is none."""
    width = weight.size
    scale = np.float32(1.0) / np.float32(width)
    for row in range(start, stop):
        source = x[row * x_row : row * x_row + width]
        to = out[row * width : (row + 1) * width]
        if residual.size:
            total = residual[row * residual_row : row * residual_row + width]
            for i in range(width):
                total[i] += source[i]
            source = total
        summed = np.float32(0.0)
        for i in range(width):
            summed += source[i]
        mean = summed * scale
        squares = np.float32(0.0)
        for i in range(width):
            squares += (source[i] - mean) * (source[i] - mean)
        factor = np.float32(1.0) / np.sqrt(squares * scale + np.float32(eps))
        if bias.size:
            for i in range(width):
                to[i] = (source[i] - mean) * factor * weight[i] + bias[i]
        else:
            for i in range(width):
                to[i] = (source[i] - mean) * factor * weight[i]


@kernel(parallel=True)
def _layer_norm(
    x_address: int, rows: int, x_row: int, residual_address: int, residual_row: int, weight_address: int, width: int,
    bias_address: int, bias_width: int, eps: float, out_address: int, threads: int,
) -> None:  # fmt: skip
    x = carray(float32_at(x_address), rows * x_row + width)
    residual = carray(float32_at(residual_address), (rows * residual_row + width) if residual_row else 0)
    weight, bias = carray(float32_at(weight_address), width), carray(float32_at(bias_address), bias_width)
    out = carray(float32_at(out_address), rows * width)
    if threads == 1:
        _rows(np.int64(0), rows, x, x_row, residual, residual_row, weight, bias, eps, out)
    else:
        for t in prange(threads):
            start, stop = share(rows, t, threads), share(rows, t + 1, threads)
            _rows(start, stop, x, x_row, residual, residual_row, weight, bias, eps, out)


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    rows, width = check("x", x, torch.float32, 2)
    if check("weight", weight, torch.float32, 1, contiguous=True)[0] != width:
        raise ValueError(f"weight: {weight.shape[0]} entries for rows of x {tuple(x.shape)}")
    bias_address = residual_address = residual_row = 0
    if bias is not None:
        if check("bias", bias, torch.float32, 1, contiguous=True)[0] != width:
            raise ValueError(f"bias: {bias.shape[0]} entries for rows of x {tuple(x.shape)}")
        bias_address = bias.data_ptr()
    if residual is not None:
        if check("residual", residual, torch.float32, 2) != x.shape:
            raise ValueError(f"residual: shape {tuple(residual.shape)} differs from x {tuple(x.shape)}")
        residual_address, residual_row = residual.data_ptr(), max(residual.stride(0), 1)
    out = torch.empty((rows, width))
    _layer_norm(
        x.data_ptr(), rows, x.stride(0), residual_address, residual_row, weight.data_ptr(), width, bias_address,
        0 if bias is None else width, float(eps), out.data_ptr(),
        1 if rows * width < PARALLEL_FLOATS else numba.get_num_threads(),
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Ops.layer_norm`.  Raises: ValueError naming the argument."""
    return _run(x, None, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `Ops.add_layer_norm`; works in place on `residual`.  Raises: ValueError naming the argument."""
    return _run(x, residual, weight, bias, eps), residual
