"""Inputs of `Ops.add_lora` whose weights are NaN wherever no real rank is, and what must come of them in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from izh.kernels.lora import AdapterRows

MIXES = {
    "none": [-1] * 6,
    "one row": [3],
    "identical": [2] * 7,
    "distinct": [4, 0, 3, 1, 2],
    "skewed": [0] * 9 + [3] + [-1] * 2 + [1] * 3 + [0] * 4,
    "mixed": [1, -1, 3, 0, 1, -1, 4, 1, 1, 0, -1, 3, 1],
}


@dataclass(frozen=True, kw_only=True)
class LoraCase:
    """`slots` is each row's slot; `ranks[s][p]` the real rank of slot s in part p."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    offsets: tuple[int, ...]
    ranks: Tensor
    slots: list[int]

    @property
    def rows(self) -> AdapterRows | None:
        return AdapterRows.of(self.slots)

    def only(self, rows: list[int]) -> "LoraCase":
        """The same with these rows alone."""
        slots = [self.slots[row] for row in rows]
        return LoraCase(
            x=self.x[rows], y=self.y[rows], a=self.a, b=self.b, offsets=self.offsets, ranks=self.ranks, slots=slots
        )

    def expected(self) -> Tensor:
        """Row by row, in the words of the definition, in float64."""
        y = self.y.double()
        for t, slot in enumerate(self.slots):
            for p, rank in enumerate(self.ranks[slot].tolist() if slot >= 0 else []):
                outputs = slice(self.offsets[p], self.offsets[p + 1])
                low = self.a[slot, p, :rank].double() @ self.x[t].double()
                y[t, outputs] += self.b[slot, outputs, :rank].double() @ low
        return y.float()


def lora_case(slots: list[int], *, width: int, offsets: tuple[int, ...], ranks: list[list[int]]) -> LoraCase:
    """Weights are scaled so that corrections are of the size of what they correct."""
    generator = torch.Generator().manual_seed(width + sum(offsets))
    num_slots, parts, max_rank = len(ranks), len(offsets) - 1, max(max(row) for row in ranks)
    a = torch.full((num_slots, parts, max_rank, width), float("nan"))
    b = torch.full((num_slots, offsets[-1], max_rank), float("nan"))
    for s, row in enumerate(ranks):
        for p, rank in enumerate(row):
            outputs = slice(offsets[p], offsets[p + 1])
            a[s, p, :rank] = torch.randn(rank, width, generator=generator) * width**-0.5
            num_outputs = offsets[p + 1] - offsets[p]
            b[s, outputs, :rank] = torch.randn(num_outputs, rank, generator=generator) * max(rank, 1) ** -0.5
    return LoraCase(
        x=torch.randn(len(slots), width, generator=generator),
        y=torch.randn(len(slots), offsets[-1], generator=generator),
        a=a,
        b=b,
        offsets=offsets,
        ranks=torch.tensor(ranks, dtype=torch.int32),
        slots=slots,
    )
