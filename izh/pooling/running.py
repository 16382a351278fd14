"""One prompt's rows, pooled chunk by chunk.

Owns: RunningPool: which positions a mode reads, and the float32 state that stands for those already read.
Must not know: sequences, steps, models.
Invariant: every position that the mode reads is taken in once, in order, however the prompt is cut and recomputed.

    span      positions that the mode reads         last, cls: one        others: skip .. num_prompt - 1
    wanted    those of a chunk not yet read         a recomputed chunk asks for none of those that were
    add       value <- value + their sum, or the larger of both (max)
    vector    value / the span's weight
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from izh.request import PoolingMode, PoolingParams


class RunningPool:
    """The state of one prompt of `num_prompt` tokens; D = hidden size."""

    def __init__(self, params: PoolingParams, num_prompt: int) -> None:
        self._mode: PoolingMode = params.mode
        self._normalize = params.normalize
        self._span = _span(params.mode, params.skip, num_prompt)
        self._next = self._span.start
        self._value: Tensor | None = None

    def wanted(self, start: int, stop: int) -> range:
        """The positions from `start` to `stop` - 1 whose rows are still needed. Pure."""
        assert start <= self._next or self._next == self._span.stop, "a position was passed over"
        return range(max(start, self._next), min(stop, self._span.stop))

    def add(self, rows: Tensor) -> None:
        """Take in the next rows [n, D] of the span."""
        rows = rows.float()
        if self._mode == "weighted_mean":
            rows = rows * torch.arange(self._next + 1, self._next + len(rows) + 1, device=rows.device)[:, None]
        new = rows.amax(0) if self._mode == "max" else rows.sum(0)
        self._next += len(rows)
        if self._value is None:
            self._value = new
        else:
            self._value = torch.maximum(self._value, new) if self._mode == "max" else self._value + new

    def vector(self, width: int) -> Tensor:
        """[width] float32, all of the span being read; zeros where it is empty."""
        assert self._next == self._span.stop, f"{self._span.stop - self._next} positions are missing"
        if self._value is None:
            return torch.zeros(width)
        vector = self._value / _weight(self._mode, self._span)
        return F.normalize(vector, dim=0) if self._normalize else vector


def _span(mode: PoolingMode, skip: int, num_prompt: int) -> range:
    if mode == "last":
        return range(num_prompt - 1, num_prompt)
    if mode == "cls":
        first = skip if skip < num_prompt else 0
        return range(first, first + 1)
    return range(min(skip, num_prompt), num_prompt)


def _weight(mode: PoolingMode, span: range) -> float:
    """What the sum over the span is divided by."""
    if mode == "mean":
        return len(span)
    if mode == "mean_sqrt_len":
        return len(span) ** 0.5
    return sum(position + 1 for position in span) if mode == "weighted_mean" else 1
