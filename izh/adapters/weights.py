"""An adapter's weights on the host, and what they are called.

Owns: ModuleDelta and Adapter; the digest that identifies effective weights.
Must not know: files, slots, the model's modules.
Invariant: an Adapter is never changed; two with the same digest compute the same function on the same base.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from izh.cache.keys import digest


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """What an adapter does to one linear [D, K] of the model. Tensors are float32, on the host.

    `b` carries the scale: the correction is b @ (a @ x). `bias`, if trained, takes the place of the linear's own (PEFT
    trains and saves the base's bias itself, not a difference from it); a delta that is a bias alone has rank 0.
    `magnitude` is DoRA's m, as trained: whoever has the base weights makes the gain of it.
    """

    a: Tensor  # [r, K]
    b: Tensor  # [D, r]
    bias: Tensor | None = None  # [D]
    magnitude: Tensor | None = None  # [D]

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def scaled(self, scale: float) -> "ModuleDelta":
        """The same direction, `scale` times as strong."""
        return ModuleDelta(self.a, self.b * scale, self.bias, self.magnitude)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field."""
        fields = {"a": self.a, "b": self.b, "bias": self.bias, "magnitude": self.magnitude}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


@dataclass(frozen=True)
class Adapter:
    """Deltas by the checkpoint's path of the linear, such as "layers.3.self_attn.q_proj", "lm_head"."""

    deltas: Mapping[str, ModuleDelta]
    scales: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What each module's b was multiplied by, where its source says so. For `report` alone."""

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
        layers: dict[tuple[str, str], list[str]] = {}
        for path, delta in self.deltas.items():
            scale = f", scale {self.scales[path]:g}" if path in self.scales else ""
            more = "".join(f", {name}" for name in delta.tensors() if name not in ("a", "b"))
            name, layer = re.sub(r"\.\d+\.", ".*.", path), re.search(r"\.(\d+)\.", path)
            layers.setdefault((name, f"rank {delta.rank}{scale}{more}"), []).extend(layer.groups() if layer else ())
        return [
            f"{name}: {what}" + (f" ({len(where)} layers: {', '.join(where)})" if where else "")
            for (name, what), where in layers.items()
        ]


def combine(uses: list[tuple[Adapter, float]]) -> Adapter:
    """The sum of several adapters, each with its scale: one adapter whose ranks add up.

    Raises ValueError for several with DoRA or trained biases, which have no sum.
    """
    if len(uses) == 1 and uses[0][1] == 1.0:
        return uses[0][0]
    has_more = any(d.bias is not None or d.magnitude is not None for each, _ in uses for d in each.deltas.values())
    if has_more:
        raise ValueError("adapters with DoRA or trained biases can be used alone and at scale 1 only")
    deltas: dict[str, list[ModuleDelta]] = {}
    for adapter, scale in uses:
        for path, delta in adapter.deltas.items():
            deltas.setdefault(path, []).append(delta.scaled(scale))
    return Adapter(
        {
            path: ModuleDelta(torch.cat([d.a for d in several]), torch.cat([d.b for d in several], dim=1))
            for path, several in deltas.items()
        }
    )
