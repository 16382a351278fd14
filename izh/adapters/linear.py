"""A projection of the model with its adapters beside it.

Owns: AdapterLinear and AdapterEmbedding, which wrap one module each and hold every slot's weights for it.
Must not know: names, slots' lives, requests: the bank writes slots and says which rows of a step use which.
Invariant: with no adapter in the step the wrapped module's own result is returned, untouched.

S = slots, P = targets fused into the projection, R = highest rank, K -> D its widths, T = rows in the step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from izh.adapters.weights import ModuleDelta
from izh.kernels.lora import AdapterRows
from izh.kernels.ops import Ops
from izh.model.decoder import Embedding


@dataclass(frozen=True, slots=True)
class Part:
    """One target inside a projection: rows start .. stop-1 of its output. `path` is the checkpoint's name for it."""

    path: str
    start: int
    stop: int


class AdapterLinear(nn.Module):
    """y = W x + bias, then for rows with an adapter: y = gain * y + shift + B (A x).

    gain and shift are 1 and 0 except for DoRA (gain = m / ||W + BA||, per output) and trained biases; B carries the
    scale, and for DoRA the gain. Ranks are the adapters' own: no time is spent on padding.
    """

    def __init__(
        self,
        base: nn.Linear,
        parts: tuple[Part, ...],
        capacity: int,
        max_rank: int,
        ops: Ops,
        rows: Callable[[], AdapterRows | None],
    ) -> None:
        super().__init__()
        weight = base.weight
        self.base = base
        self.parts = parts
        self.a = weight.new_zeros(capacity, len(parts), max_rank, weight.shape[1])
        self.b = weight.new_zeros(capacity, weight.shape[0], max_rank)
        self.ranks = torch.zeros(capacity, len(parts), dtype=torch.int32)
        self.gain: Tensor | None = None  # [S, D], made when the first adapter needs it; the same for shift
        self.shift: Tensor | None = None
        self._offsets = (*(part.start for part in parts), parts[-1].stop)
        self._ops = ops
        self._rows = rows

    @property
    def weight(self) -> Tensor:
        """The base weight [D, K]: also what a tied embedding shares."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, D]."""
        y = self.base(x)
        rows = self._rows()
        if rows is None:
            return y
        if self.gain is not None and self.shift is not None:
            order, slot = rows.order.long(), rows.slot_of_row
            y[order] = y[order] * self.gain[slot] + self.shift[slot]
        self._ops.add_lora(y, x, self.a, self.b, self._offsets, self.ranks, rows)
        return y

    def write(self, slot: int, deltas: dict[str, ModuleDelta]) -> None:
        """Put an adapter's weights into the slot; targets it does not have get rank 0. Everything was validated."""
        self.ranks[slot] = 0
        if self.gain is not None and self.shift is not None:
            self.gain[slot], self.shift[slot] = 1.0, 0.0
        for index, part in enumerate(self.parts):
            delta = deltas.get(part.path)
            if delta is None:
                continue
            rank, outputs = delta.a.shape[0], slice(part.start, part.stop)
            b = delta.b
            if delta.magnitude is not None or delta.bias is not None:
                gain, shift = self._affine(delta, outputs)
                b = b * gain[:, None]
                self._keep_affine(slot, outputs, gain, shift)
            self.a[slot, index, :rank] = delta.a
            self.b[slot, outputs, :rank] = b
            self.ranks[slot, index] = rank

    def _affine(self, delta: ModuleDelta, outputs: slice) -> tuple[Tensor, Tensor]:
        """gain, shift [D of the part] float32: DoRA's m / ||W + BA|| (Liu et al. 2024, section 4.1), and the bias."""
        weight = self.weight[outputs].float()
        own = self.base.bias if self.base.bias is not None else weight.new_zeros(len(self.base.weight))
        base_bias = own[outputs].float()
        gain = torch.ones(weight.shape[0])
        if delta.magnitude is not None:
            gain = delta.magnitude / torch.linalg.norm(weight + delta.b @ delta.a, dim=1)
        bias = base_bias if delta.bias is None else delta.bias
        return gain, bias - gain * base_bias

    def _keep_affine(self, slot: int, outputs: slice, gain: Tensor, shift: Tensor) -> None:
        if self.gain is None or self.shift is None:
            shape = (self.a.shape[0], self.b.shape[1])
            self.gain = torch.ones(shape, dtype=self.b.dtype, device=self.b.device)
            self.shift = torch.zeros(shape, dtype=self.b.dtype, device=self.b.device)
        self.gain[slot, outputs] = gain.to(self.gain)
        self.shift[slot, outputs] = shift.to(self.shift)


class AdapterEmbedding(nn.Module):
    """The token embedding: for rows with an adapter, e = W[id] + B A[:, id]. a is [S, R, V], b is [S, D, R]."""

    def __init__(
        self, base: Embedding, path: str, capacity: int, max_rank: int, rows: Callable[[], AdapterRows | None]
    ) -> None:
        super().__init__()
        weight = base.weight
        self.base = base
        self.parts = (Part(path, 0, weight.shape[1]),)
        self.a = weight.new_zeros(capacity, max_rank, weight.shape[0])
        self.b = weight.new_zeros(capacity, weight.shape[1], max_rank)
        self.is_used = [False] * capacity
        self._rows = rows

    @property
    def weight(self) -> Tensor:
        """The base table [V, D]."""
        return self.base.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, D]."""
        y = self.base(token_ids)
        rows = self._rows()
        if rows is None or not any(self.is_used):
            return y
        order, slot = rows.order.long(), rows.slot_of_row
        low = self.a[slot, :, token_ids[order]]  # [n, R]
        y[order] += torch.einsum("ndr,nr->nd", self.b[slot], low)
        return y

    def write(self, slot: int, deltas: dict[str, ModuleDelta]) -> None:
        """Put an adapter's weights into the slot, or clear it. Everything was validated."""
        delta = deltas.get(self.parts[0].path)
        self.is_used[slot] = delta is not None
        self.a[slot] = 0.0
        if delta is not None:
            rank = delta.a.shape[0]
            self.a[slot, :rank] = delta.a
            self.b[slot, :, :rank] = delta.b
