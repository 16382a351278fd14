"""From rows of hidden states to one vector per sequence.

Owns: `pool_hidden` for padded batches, `pool_packed` for sequences laid end to end.
Must not know: models, tokenizers, requests.
Invariant: a vector depends on its own sequence's rows only; whatever stands in padding, also NaN, has no part in it.

B, S = sequences, T = positions or rows, D = hidden size.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from izh.request import PoolingMode

Mode = Literal["mean", "last", "cls"]
MODES = ("mean", "last", "cls")


def pool_hidden(hidden: Tensor, mask: Tensor, mode: str = "mean", normalize: bool = True) -> Tensor:
    """hidden [B, T, D], mask [B, T] (nonzero = visible) -> [B, D] float32, of length 1 when `normalize`.

    "mean" is over the visible positions, "last" the last visible one wherever padding lies, "cls" position 0.
    Raises: ValueError for a wrong shape, an unknown mode, a row with no visible token, "cls" with position 0 hidden.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not known; choose one of {', '.join(MODES)}")
    if hidden.dim() != 3:
        raise ValueError(f"hidden: shape {tuple(hidden.shape)}; it must be [batch, positions, width]")
    if mask.shape != hidden.shape[:2]:
        raise ValueError(
            f"mask: shape {tuple(mask.shape)} for hidden {tuple(hidden.shape)}; it must be [batch, positions]"
        )
    visible = mask != 0
    counts = visible.sum(1)
    if (counts == 0).any():
        raise ValueError(f"mask: row {int((counts == 0).nonzero()[0])} has no visible token")
    rows = torch.arange(len(hidden), device=hidden.device)
    if mode == "mean":
        pooled = hidden.float().masked_fill(~visible[..., None], 0.0).sum(1) / counts[:, None]
    elif mode == "last":
        positions = torch.arange(visible.shape[1], device=mask.device).expand_as(visible)
        pooled = hidden[rows, positions.masked_fill(~visible, -1).amax(1)].float()
    else:
        if not visible[:, 0].all():
            row = int((~visible[:, 0]).nonzero()[0])
            raise ValueError(f"mask: row {row} hides position 0, where mode 'cls' reads; pad on the right")
        pooled = hidden[:, 0].float()
    return F.normalize(pooled, dim=-1) if normalize else pooled


def pool_packed(hidden: Tensor, starts: Sequence[int], modes: Sequence[PoolingMode], skips: Sequence[int]) -> Tensor:
    """hidden [T, D], sequence s in rows starts[s] .. starts[s+1]-1, its first skips[s] left out -> [S, modes * D].

    float32, not normalized; several modes stand side by side. A sequence of which nothing is left gives zeros, as in
    sentence-transformers.
    """
    vectors = []
    for (start, stop), skip in zip(pairwise(starts), skips, strict=True):
        parts = [_pool(hidden[start:stop].float(), mode, skip) for mode in modes]
        vectors.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    return torch.stack(vectors)


def _pool(rows: Tensor, mode: PoolingMode, skip: int) -> Tensor:
    """rows [L, D] -> [D]."""
    if mode == "last":
        return rows[-1]
    if mode == "cls":
        return rows[skip if skip < len(rows) else 0]
    kept = rows[skip:]
    if not len(kept):
        return torch.zeros_like(rows[0])
    if mode == "max":
        return kept.amax(0)
    if mode == "weighted_mean":
        weights = torch.arange(skip + 1, len(rows) + 1, dtype=torch.float32, device=rows.device)
        return (kept * weights[:, None]).sum(0) / weights.sum()
    return kept.sum(0) / (len(kept) if mode == "mean" else len(kept) ** 0.5)
