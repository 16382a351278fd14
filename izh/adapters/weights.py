"""An adapter's weights on the host, and what they are called.

Owns: ModuleDelta and Adapter; the digest that identifies effective weights.
Must not know: files, slots, the model's modules.
Invariant: an Adapter is never changed; two with the same digest compute the same function on the same base.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor

from izh.adapters.rows import ReplacedRows
from izh.cache.keys import digest


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """What an adapter does to one linear [D, K] of the model. Tensors are float32, on the host.

    `b` carries the scale: the correction is b @ (a @ x). `bias`, if trained, takes the place of the linear's own (PEFT
    trains and saves the base's bias itself, not a difference from it). `shift` is added to the output, scale included.
    `magnitude` is DoRA's m, as trained: whoever has the base weights makes the gain of it. Row `row_ids[i]` of the base
    weight is `rows[i]` for this adapter, before anything else. A delta without A and B has rank 0.

    Of the token embedding, a table [V, D], V takes the place of K: a is [r, V] and b [D, r]; rows are the table's.
    """

    a: Tensor  # [r, K]
    b: Tensor  # [D, r]
    bias: Tensor | None = None  # [D]
    magnitude: Tensor | None = None  # [D]
    shift: Tensor | None = None  # [D]
    row_ids: Tensor | None = None  # [n] int64, ascending
    rows: Tensor | None = None  # [n, K]

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def scaled(self, scale: float) -> "ModuleDelta":
        """The same direction, `scale` times as strong: of one that has a direction (`is_sum`)."""
        assert self.is_sum
        return ModuleDelta(self.a, self.b * scale, shift=None if self.shift is None else self.shift * scale)

    @property
    def is_sum(self) -> bool:
        """True when it only adds to the output, so that it can be scaled and added to others."""
        return self.bias is None and self.magnitude is None and self.rows is None

    @property
    def replaced(self) -> ReplacedRows | None:
        """The rows of the base weight that it replaces, if any."""
        return None if self.row_ids is None or self.rows is None else ReplacedRows(self.row_ids, self.rows)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class Adapter:
    """Deltas by the checkpoint's path of the linear, such as "layers.3.self_attn.q_proj", "lm_head"."""

    deltas: Mapping[str, ModuleDelta]
    scales: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What each module's b was multiplied by, where its source says so. For `report` alone."""
    gains: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """DoRA's m / ||W + BA|| of each module with a magnitude, once worked out from the base weights
    (`AdapterBank.fit`)."""

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the effective weights: equal under any name, different after any change."""
        parts: list[bytes | str | int] = []
        for path in sorted(self.deltas):
            for name, tensor in self.deltas[path].tensors().items():
                values = digest("values", tensor.contiguous().numpy().tobytes())  # one tensor's bytes at a time
                parts += [path, name, *tensor.shape, str(tensor.dtype), values]
        return digest("adapter", *parts)

    @cached_property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for d in self.deltas.values() for t in d.tensors().values())

    @property
    def rank(self) -> int:
        """The highest rank of any module."""
        return max(delta.rank for delta in self.deltas.values())

    def report(self) -> list[str]:
        """What is adapted and how, for people: one line for the modules that differ in their layer only."""
        layers: dict[tuple[str, str], list[int]] = {}
        for path, delta in self.deltas.items():
            scale = f", scale {self.scales[path]:g}" if path in self.scales else ""
            more = "".join(f", {name}" for name in delta.tensors() if name in ("bias", "magnitude", "shift"))
            more += "" if delta.rows is None else f", {len(delta.rows)} rows replaced"
            name, layer = re.sub(r"\.\d+\.", ".*.", path), re.search(r"\.(\d+)\.", path)
            layers.setdefault((name, f"rank {delta.rank}{scale}{more}"), []).extend([int(layer[1])] if layer else [])
        return [
            f"{name}: {what}" + (f" (layers {_ranges(sorted(where))})" if where else "")
            for (name, what), where in layers.items()
        ]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"; ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def combine(uses: list[tuple[Adapter, float]]) -> Adapter:
    """The sum of several adapters, each with its scale: one adapter whose ranks add up.

    Raises ValueError for several with DoRA, trained biases or replaced rows, which have no sum.
    """
    if len(uses) == 1 and uses[0][1] == 1.0:
        return uses[0][0]
    if not all(delta.is_sum for adapter, _scale in uses for delta in adapter.deltas.values()):
        raise ValueError(
            "adapters with DoRA, trained biases, trained tokens or saved modules can be used alone and at scale 1 only"
        )
    deltas: dict[str, list[ModuleDelta]] = {}
    for adapter, scale in uses:
        for path, delta in adapter.deltas.items():
            deltas.setdefault(path, []).append(delta.scaled(scale))
    return Adapter({path: _sum(several) for path, several in deltas.items()})


def _sum(deltas: list[ModuleDelta]) -> ModuleDelta:
    shifts = [delta.shift for delta in deltas if delta.shift is not None]
    return ModuleDelta(
        torch.cat([delta.a for delta in deltas]),
        torch.cat([delta.b for delta in deltas], dim=1),
        shift=torch.stack(shifts).sum(0) if shifts else None,
    )
