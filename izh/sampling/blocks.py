"""Reading long rows in blocks, so that no row of a vocabulary is ever sorted or scanned one element at a time.

Owns: the maximum and the largest few of each row of a matrix.
Must not know: sampling parameters, sequences.
Invariant: what is computed for a row depends on that row alone, bit for bit.

R = rows, V = columns, W = block width. A row is seen as ceil(V / W) blocks; the last may be short.
"""

import torch
from torch import Tensor

_WIDTH = 256  # columns per block for the maximum: both levels of a two-level search stay short
_STRIDE = 32  # columns per block for candidates: enough blocks to hold the best few, few columns in each


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values [R], columns [R] int64) of each row's maximum; the lowest column of a tie; NaN beats every number."""
    values, columns = _block_of(x, _block_maxima(x).argmax(1))
    best = values.argmax(1, keepdim=True)
    return values.gather(1, best)[:, 0], columns.gather(1, best)[:, 0]


def top_candidates(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values [R, C], columns [R, C] int64) of each row's C = min(count, V) largest, descending; ties in any order.

    The C largest lie in the C blocks with the largest maxima: whoever is in another block has C blocks' maxima above
    or beside it. So only those blocks are searched.
    """
    num_columns = x.shape[1]
    num_blocks = num_columns // _STRIDE
    count = min(count, num_columns)
    if num_blocks <= count:
        values, columns = x.topk(count, dim=1)
        return values, columns
    # Block j holds columns j, j + num_blocks, ...: its maximum is an elementwise maximum of contiguous runs. The
    # columns left over at the end are candidates without contest.
    whole = num_blocks * _STRIDE
    peaks = x[:, :whole].view(-1, _STRIDE, num_blocks).amax(1)
    blocks = peaks.topk(count, dim=1, sorted=False).indices
    steps = torch.arange(0, whole, num_blocks, device=x.device)
    columns = (steps[:, None] + blocks[:, None, :]).view(len(x), -1)
    if whole < num_columns:
        rest = torch.arange(whole, num_columns, device=x.device).expand(len(x), -1)
        columns = torch.cat([columns, rest], dim=1)
    values, place = x.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, place)


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
