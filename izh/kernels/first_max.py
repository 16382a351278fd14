"""The largest of a row and where it lies, as PyTorch computes it (the op of that name in `ops.py`).

Must not know: what the rows are.
Invariant: what is found in a row depends on that row alone, bit for bit.

R = rows, V = columns, W = block width. A row is seen as ceil(V / W) blocks, the last of which may be short, because
torch finds a maximum far faster than its place: so the place is looked for in one block only.
"""

import torch
from torch import Tensor

_WIDTH = 256  # columns per block: both levels of the search stay short


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values [R], columns [R] int64) of each row's maximum; the lowest column of a tie; NaN beats every number."""
    values, columns = _block_of(x, _block_maxima(x).argmax(1))
    best = values.argmax(1, keepdim=True)
    return values.gather(1, best)[:, 0], columns.gather(1, best)[:, 0]


def _block_maxima(x: Tensor) -> Tensor:
    """[R, ceil(V / W)]"""
    num_columns = x.shape[1]
    whole = num_columns - num_columns % _WIDTH
    parts = [x[:, :whole].view(len(x), -1, _WIDTH).amax(-1)] if whole else []
    if whole < num_columns:
        parts.append(x[:, whole:].amax(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _block_of(x: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """(values [R, W], columns [R, W]) of one block per row; beyond the end of a short last block, -inf and the row's
    last column, so that even a row of NaN is answered with columns that exist."""
    columns = block[:, None] * _WIDTH + torch.arange(_WIDTH, device=x.device)
    inside = columns.clamp(max=x.shape[1] - 1)
    return x.gather(1, inside).masked_fill_(columns != inside, -torch.inf), inside
