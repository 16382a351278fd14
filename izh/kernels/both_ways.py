"""Attention of an image's rows that see each other both ways (Gemma 3).

Owns: `attend_both_ways`, for the few rows of a step that see keys after their own.
Must not know: images; batches beyond row ranges and pages.
Invariant: it is plain PyTorch on every device, so one definition; the causal op stays free of a case it rarely meets.
An image is a few hundred rows, computed once: gathering its keys costs little beside the rest of its prompt.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_both_ways(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, blocks: Tensor, stop: int, scale: float, window: int | None
) -> Tensor:
    """Rows at the positions stop - R .. stop - 1 of a sequence see keys j < stop, those after their own too.

    Semantics: row at position p sees key j when j < stop and, if `window` is not None, j > p - window.
    Shapes: q [R, H, D]; pages [N, G, B, D]; blocks [M] int32, the sequence's, of which the first ceil(stop / B) are
    read -> [R, H, D].
    """
    num_rows, num_heads, _ = q.shape
    first, mask = 0, None
    if window is not None:
        first = max(0, stop - num_rows - window + 1)  # what the first row sees; the others see less
        position = torch.arange(stop - num_rows, stop, device=q.device)[:, None]
        mask = torch.arange(first, stop, device=q.device) > position - window
    keys, values = (_gathered(pages, blocks, first, stop).to(q.dtype) for pages in (k_pages, v_pages))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        None if mask is None else mask[None, None],
        scale=scale,
        enable_gqa=num_heads != keys.shape[0],
    )
    return out[0].transpose(0, 1)


def _gathered(pages: Tensor, blocks: Tensor, first: int, stop: int) -> Tensor:
    """Keys first .. stop - 1 of a sequence, [G, stop - first, D]."""
    _, heads, size, width = pages.shape
    skipped = first // size
    used = blocks[skipped : -(-stop // size)].long()
    rows = pages[used].transpose(0, 1).reshape(heads, -1, width)
    return rows[:, first - skipped * size : stop - skipped * size]
