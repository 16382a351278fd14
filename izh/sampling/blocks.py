"""Reading long rows in blocks, so that no row of a vocabulary is ever sorted.

Owns: the largest few of each row of a matrix.
Must not know: sampling parameters, sequences.
Invariant: what is computed for a row depends on that row alone, bit for bit.

R = rows, V = columns.
"""

import torch
from torch import Tensor

_STRIDE = 32  # columns per block for candidates: enough blocks to hold the best few, few columns in each


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
