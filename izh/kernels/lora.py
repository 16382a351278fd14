"""Low-rank corrections: which rows take which adapter, and the definition of the arithmetic.

Owns: AdapterRows, how B lies in memory, `grouped_lora` (the definition) and `add_lora` (the op in plain PyTorch, one
pair of matrix products per adapter in the step).
Must not know: adapters' names, modules, requests.
Invariant: no time is spent on rank padding, on slots that no row uses, or on rows without an adapter.

N, T = rows, S = slots, P = parts of a fused projection, R = highest rank, K -> D widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The rows of one step that have an adapter, grouped by slot: made once, used by every layer.

    n such rows in G groups; only slots that occur have a group.
    """

    order: Tensor  # [n] int32: row numbers, sorted by slot, and within a slot as they come
    slot_of_row: Tensor  # [n] int64: the slot of each of these
    starts: Tensor  # [G + 1] int32: rows order[starts[g] : starts[g + 1]] are group g
    slots: Tensor  # [G] int32: its slot
    groups: tuple[tuple[int, int, int], ...]  # the same for the host: (slot, start, stop)
    longest: int  # rows of the largest group

    @classmethod
    def of(cls, slots: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> "AdapterRows | None":
        """From each row's slot, -1 for none. None when no row has an adapter: the base path is taken then."""
        all_slots = torch.as_tensor(slots, dtype=torch.int64, device="cpu")
        order = torch.argsort(all_slots, stable=True)
        order = order[int((all_slots < 0).sum()) :]
        if not len(order):
            return None
        sorted_slots = all_slots[order]
        used, counts = torch.unique_consecutive(sorted_slots, return_counts=True)
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        bounds = starts.tolist()
        return cls(
            order=order.int().to(device),
            slot_of_row=sorted_slots.to(device),
            starts=starts.int().to(device),
            slots=used.int().to(device),
            groups=tuple(zip(used.tolist(), bounds[:-1], bounds[1:], strict=True)),
            longest=int(counts.max()),
        )

    @cached_property
    def used(self) -> frozenset[int]:
        """The slots that have rows."""
        return frozenset(slot for slot, _, _ in self.groups)

    @cached_property
    def host_memory(self) -> tuple[int, int, int, int, int]:
        """For kernels on CPU: the address of order and its length, those of starts and slots, and G. Raises ValueError
        where they lie on another device."""
        if not self.order.is_cpu:
            raise ValueError(f"rows: they lie on {self.order.device}; the CPU kernel takes rows on cpu")
        starts, slots = self.starts.data_ptr(), self.slots.data_ptr()
        return self.order.data_ptr(), len(self.order), starts, slots, len(self.groups)

    @property
    def tile_rows(self) -> int:
        """Rows per tile: the least that a tensor core takes, unless there are long groups to be cut."""
        return 16 if self.longest <= 32 else 64

    @cached_property
    def tiles(self) -> Tensor:
        """[N, 3] int32: (slot, start, stop) of pieces of at most `tile_rows` rows, none of them empty."""
        size = self.tile_rows
        pieces = [(s, at, min(at + size, stop)) for s, start, stop in self.groups for at in range(start, stop, size)]
        return torch.tensor(pieces, dtype=torch.int32).to(self.order.device)


def lora_room(weight: Tensor, num_slots: int, max_rank: int, by_rank: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros for the b [S, D, R] of a projection of `weight` [D, K], in its dtype if no other is given and on its
    device.

    `by_rank` is what `Ops.lora_b_by_rank` says: a rank's outputs then lie side by side, and ranks an odd number of
    cache lines apart: those of one output would all fall on the same few places of a cache if that were a power of two.
    """
    outputs = weight.shape[0]
    if not by_rank:
        return weight.new_zeros(num_slots, outputs, max_rank, dtype=dtype)
    line = 64 // (dtype or weight.dtype).itemsize
    row = ((outputs + line - 1) // line | 1) * line
    return weight.new_zeros(num_slots, max_rank, row, dtype=dtype)[..., :outputs].transpose(1, 2)


def grouped_lora(x: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> Tensor:
    """x [N, K], a [S, R, K], b [S, D, R], slots [N] int64 -> [N, D]: y[i] = b[s] @ (a[s] @ x[i]) with s = slots[i];
    exactly zero where s = -1. Accumulates in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_zeros(x.shape[0], b.shape[1])
    rows = (slots >= 0).nonzero()[:, 0]
    used = slots[rows]
    low = torch.einsum("nrk,nk->nr", a[used].to(wide), x[rows].to(wide))
    y[rows] = torch.einsum("ndr,nr->nd", b[used].to(wide), low).to(x.dtype)
    return y


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: tuple[int, ...], ranks: Tensor, rows: AdapterRows
) -> None:
    """The op of the same name in izh/kernels/ops.py."""
    num_parts = len(offsets) - 1
    real = ranks.tolist()
    covers_all = len(rows.groups) == 1 and len(rows.order) == x.shape[0]
    for slot, start, stop in rows.groups:
        if not any(real[slot]):
            continue
        index = rows.order[start:stop]
        group = x if covers_all else x[index]
        for part in range(num_parts):
            rank = real[slot][part]
            if rank == 0:
                continue
            low = group @ a[slot, part, :rank].T
            outputs = slice(offsets[part], offsets[part + 1])
            delta = low @ b[slot, outputs, :rank].T
            if covers_all:
                y[:, outputs] += delta
            else:
                y[:, outputs].index_add_(0, index, delta)
