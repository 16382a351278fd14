"""The CPU's op table in which each row is computed in one order of arithmetic, whatever else is in the step.

Owns: `DETERMINISTIC: Ops`.
Must not know: schedules, models.
Invariant: a row of each op depends, to the last bit, on that row and the weights (or pages) alone: not on how many rows
there are, where among them it lies, how they are grouped by adapter, or how many threads run.

`NUMBA` is like that but for one thing: products of many rows are the vendor's, which pick their order by shape. Here
the kernel for few rows takes them, a block at a time.
"""

from dataclasses import replace

import torch
from torch import Tensor

from izh.kernels.cpu import linear as few
from izh.kernels.cpu.table import NUMBA


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `Ops.linear`. Raises: ValueError naming the argument."""
    if len(x) <= few.MAX_ROWS:
        return few.linear(x, weight, bias)
    return torch.cat([few.linear(rows, weight, bias) for rows in x.split(few.MAX_ROWS)])


DETERMINISTIC = replace(NUMBA, linear=linear)
