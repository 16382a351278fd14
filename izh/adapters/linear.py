"""A projection of the model with its adapters beside it.

Owns: AdapterLinear and AdapterEmbedding, which wrap one module each and hold every slot's weights for it.
Must not know: names, slots' lives, requests: the bank writes slots and says which rows of a step use which.
Invariant: with no adapter in the step the wrapped module's own result is returned, untouched.

S = slots, P = targets fused into the projection, R = highest rank, K -> D its widths, T = rows in the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from izh.adapters.rows import ReplacedRows
from izh.adapters.weights import ModuleDelta
from izh.kernels.lora import AdapterRows, lora_room
from izh.kernels.ops import LoraLinear, Ops
from izh.model.decoder import Embedding
from izh.model.layers import Linear
from izh.model.module import Module
from izh.model.quantize import LowBitEmbedding, LowBitLinear, dequantized


@dataclass(frozen=True, slots=True)
class Part:
    """One target inside a projection: rows start .. stop-1 of its output. `path` is the checkpoint's name for it."""

    path: str
    start: int
    stop: int


class AdapterLinear(Module):
    """y = W x + bias, then for rows with an adapter: y = gain * y + shift + B (A x).

    gain and shift are 1 and 0 except for DoRA (gain = m / ||W + BA||, per output) and trained biases; B carries the
    scale, and for DoRA the gain. Ranks are the adapters' own: no time is spent on padding. Where an adapter replaces
    rows of W (an LM head that was trained), its rows of the step are projected again, by these alone.

    A projection that no adapter of the step adapts is the wrapped module alone, as with no adapter in the step.

    Where the kernels can read it, A and B are float16 for as long as that holds every number exactly, as it does those
    of adapters saved in it: half the memory to read. The first adapter that needs more makes them wide.
    """

    def __init__(
        self,
        base: nn.Linear | LowBitLinear,
        parts: tuple[Part, ...],
        capacity: int,
        max_rank: int,
        ops: Ops,
        rows: Callable[[], AdapterRows | None],
    ) -> None:
        super().__init__()
        # Of 8-bit weights there is no tensor of floats: one without width says what the room for B is made of.
        weight = base.weight if isinstance(base, nn.Linear) else torch.empty(base.out_features, 0)
        self.base = base
        self.parts = parts
        dtype = torch.float16 if ops.lora_half else weight.dtype
        self.a = weight.new_zeros(capacity, len(parts), max_rank, base.in_features, dtype=dtype)
        self.b = lora_room(weight, capacity, max_rank, ops.lora_b_by_rank, dtype)
        self._dtype = weight.dtype
        self.ranks = torch.zeros(capacity, len(parts), dtype=torch.int32)
        self.gain: Tensor | None = None  # [S, D], made when the first adapter needs it; the same for shift
        self.shift: Tensor | None = None
        self._written: set[int] = set()  # slots whose adapter adapts this projection
        self._has_affine: set[int] = set()  # slots whose gain or shift is not 1 or 0
        self._replaced: dict[tuple[int, int], ReplacedRows] = {}  # by slot and part
        self._offsets = (*(part.start for part in parts), parts[-1].stop)
        self._ops = ops
        self._rows = rows
        # Beyond so many rows a base of ours has a way of its own.
        self._few_rows = (base.ops if isinstance(base, Linear) else ops).few_rows
        self.at_once = self._base_and_lora()

    def adapts(self, rows: AdapterRows) -> bool:
        """Whether an adapter of the step adapts this projection."""
        return not self._written.isdisjoint(rows.used)

    def adds_only(self, rows: AdapterRows) -> bool:
        """Whether `at_once` is all that these rows need."""
        return self.at_once is not None and not self._does_more(rows)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, D]."""
        rows = self._rows()
        if rows is None or not self.adapts(rows):
            return self.base(x)
        if x.shape[0] <= self._few_rows and self.adds_only(rows):
            assert self.at_once is not None
            return self.at_once(x, rows)
        y = self.base(x)
        if self._replaced:
            self._project_again(y, x, rows)
        if self._has_affine:
            self._scale_and_shift(y, rows)
        self._ops.add_lora(y, x, self.a, self.b, self._offsets, self.ranks, rows)
        return y

    def _base_and_lora(self) -> LoraLinear | None:
        """Both in one, of the tensors that there are now, if the kernels have that and it is the base's arithmetic."""
        base, ops = self.base, self._ops
        if ops.linear_lora is None or not isinstance(base, Linear) or base.ops.linear_lora is not ops.linear_lora:
            return None
        return ops.linear_lora(base.weight, base.bias, self.a, self.b, self._offsets, self.ranks)

    def _does_more(self, rows: AdapterRows) -> bool:
        """Whether an adapter of the step does more here than to add B (A x)."""
        if not (self._has_affine or self._replaced):
            return False
        more = self._has_affine.union(slot for slot, _part in self._replaced)
        return not more.isdisjoint(rows.used)

    def _scale_and_shift(self, y: Tensor, rows: AdapterRows) -> None:
        assert self.gain is not None
        assert self.shift is not None
        for slot, start, stop in rows.groups:
            if slot in self._has_affine:
                index = rows.order[start:stop].long()
                y[index] = y[index] * self.gain[slot] + self.shift[slot]

    def _project_again(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Put what replaced rows give into y. Base weights have no bias there (see `AdapterBank.check`)."""
        for slot, start, stop in rows.groups:
            index = rows.order[start:stop].long()
            for number, part in enumerate(self.parts):
                replaced = self._replaced.get((slot, number))
                if replaced is not None:
                    again = replaced.project(x[index], self._ops)
                    y[index[:, None], part.start + replaced.ids] = again.to(y)

    def dora_gain(self, part: Part, delta: ModuleDelta) -> Tensor:
        """What DoRA scales the part's outputs by, [D of the part]."""
        base = self.base
        if isinstance(base, LowBitLinear):
            return _dora_gain(delta, _own(delta, dequantized(base, part.start, part.stop)))
        return _dora_gain(delta, _own(delta, base.weight[part.start : part.stop]))

    def write(self, slot: int, deltas: Mapping[str, ModuleDelta], gains: Mapping[str, Tensor]) -> None:
        """Put an adapter's weights into the slot; targets it does not have get rank 0. Everything was validated, and
        `gains` has what `dora_gain` says of each part with DoRA."""
        self.ranks[slot] = 0
        self._has_affine.discard(slot)
        self._written.discard(slot)
        for index, part in enumerate(self.parts):
            self._replaced.pop((slot, index), None)
            delta = deltas.get(part.path)
            if delta is None:
                continue
            self._written.add(slot)
            if delta.replaced is not None:
                self._replaced[slot, index] = delta.replaced.to(self.a.device)
            rank, outputs = delta.rank, slice(part.start, part.stop)
            b = delta.b
            if delta.magnitude is not None or delta.bias is not None or delta.shift is not None:
                gain = torch.ones(part.stop - part.start) if delta.magnitude is None else gains[part.path]
                b = b * gain[:, None]
                self._keep_affine(slot, outputs, gain, self._shift(delta, outputs, gain))
            if self.a.dtype is not self._dtype and not (_fits_half(delta.a) and _fits_half(b)):
                self._widen()
            self.a[slot, index, :rank] = delta.a
            self.b[slot, outputs, :rank] = b
            self.ranks[slot, index] = rank

    def _widen(self) -> None:
        """Keep A and B in the format of the base from now on."""
        narrow = self.b
        self.a = self.a.to(self._dtype)
        num_slots, outputs, max_rank = narrow.shape
        room = narrow.new_empty(outputs, 0, dtype=self._dtype)
        self.b = lora_room(room, num_slots, max_rank, self._ops.lora_b_by_rank)
        self.b.copy_(narrow)
        self.at_once = self._base_and_lora()

    def _shift(self, delta: ModuleDelta, outputs: slice, gain: Tensor) -> Tensor:
        """What is added to the outputs once they are scaled, [D of the part] float32 on the host."""
        base_bias = torch.zeros(len(gain)) if self.base.bias is None else self.base.bias[outputs].float().cpu()
        shift = (base_bias if delta.bias is None else delta.bias) - gain * base_bias
        return shift if delta.shift is None else shift + delta.shift

    def _keep_affine(self, slot: int, outputs: slice, gain: Tensor, shift: Tensor) -> None:
        if self.gain is None or self.shift is None:
            shape = (self.a.shape[0], self.b.shape[1])
            self.gain = torch.ones(shape, dtype=self._dtype, device=self.b.device)
            self.shift = torch.zeros(shape, dtype=self._dtype, device=self.b.device)
        if slot not in self._has_affine:
            self.gain[slot], self.shift[slot] = 1.0, 0.0
            self._has_affine.add(slot)
        self.gain[slot, outputs] = gain.to(self.gain)
        self.shift[slot, outputs] = shift.to(self.shift)


class AdapterEmbedding(Module):
    """The token embedding: for rows with an adapter, e = gain * W[id] + B A[:, id], W with the rows that it replaces.

    a is [S, R, V], b is [S, D, R]; gain is 1 except for DoRA.
    """

    def __init__(
        self,
        base: Embedding | LowBitEmbedding,
        path: str,
        capacity: int,
        max_rank: int,
        ops: Ops,
        rows: Callable[[], AdapterRows | None],
    ) -> None:
        super().__init__()
        weight = base.weight if isinstance(base, Embedding) else torch.empty(0)
        num_tokens, size = weight.shape if isinstance(base, Embedding) else (base.num_tokens, base.size)
        self.base = base
        self.parts = (Part(path, 0, size),)
        self.a = weight.new_zeros(capacity, max_rank, num_tokens)
        self.b = weight.new_zeros(capacity, size, max_rank)
        self.ranks = [0] * capacity
        self._gain: dict[int, Tensor] = {}  # [D], by slot
        self._replaced: dict[int, ReplacedRows] = {}  # by slot
        self._ops = ops
        self._rows = rows

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, D]."""
        y = self.base(token_ids)
        rows = self._rows()
        if rows is None:
            return y
        for slot, start, stop in rows.groups:
            if self.ranks[slot] or slot in self._replaced:
                index = rows.order[start:stop].long()
                y[index] = self._embed(slot, y[index], token_ids[index])
        return y

    def _embed(self, slot: int, base: Tensor, tokens: Tensor) -> Tensor:
        """base [n, D], the base's rows for tokens [n] -> the adapter's."""
        rank = self.ranks[slot]
        found = self._replaced[slot].look_up(base, tokens) if slot in self._replaced else base
        if slot in self._gain:
            found = found * self._gain[slot]
        return found + self._ops.linear(self.a[slot][:rank, tokens].T.contiguous(), self.b[slot, :, :rank], None)

    def dora_gain(self, part: Part, delta: ModuleDelta) -> Tensor:
        """What DoRA scales the base's part of an embedding by, [D]."""
        base = self.base
        table = base.weight if isinstance(base, Embedding) else dequantized(base, 0, base.num_tokens)
        return _dora_gain(delta, _own(delta, table).T)

    def write(self, slot: int, deltas: Mapping[str, ModuleDelta], gains: Mapping[str, Tensor]) -> None:
        """Put an adapter's weights into the slot, or clear it. Everything was validated, and `gains` has what
        `dora_gain` says, if there is DoRA."""
        self.ranks[slot] = 0
        self._gain.pop(slot, None)
        self._replaced.pop(slot, None)
        path = self.parts[0].path
        delta = deltas.get(path)
        if delta is None:
            return
        if delta.replaced is not None:
            self._replaced[slot] = delta.replaced.to(self.a.device)
        rank, b = delta.rank, delta.b
        if delta.magnitude is not None:
            b = b * gains[path][:, None]
            self._gain[slot] = gains[path].to(self.b)
        self.a[slot, :rank] = delta.a
        self.b[slot, :, :rank] = b
        self.ranks[slot] = rank


def _fits_half(values: Tensor) -> bool:
    """Whether float16 holds all of them exactly."""
    return torch.equal(values.half().to(values.dtype), values)


def _own(delta: ModuleDelta, weight: Tensor) -> Tensor:
    """The base weight, in float32, with the rows that the adapter replaces."""
    return weight.float() if delta.replaced is None else delta.replaced.to(weight.device).merged(weight)


def _dora_gain(delta: ModuleDelta, weight: Tensor) -> Tensor:
    """m / ||W + BA|| of each output, [D] float32 on the host (Liu et al. 2024, section 4.1); W is `weight` [D, K]. Of a
    token embedding, K is the vocabulary, as PEFT has it."""
    assert delta.magnitude is not None
    low = delta.b.to(weight.device) @ delta.a.to(weight.device)
    return delta.magnitude / torch.linalg.norm(weight + low, dim=1).cpu()
