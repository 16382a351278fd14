"""Adapters on the device: slots of low-rank weights beside the model's own.

Owns: AdapterBank, which wraps a model's projections once and keeps each slot's weights; which rows apply which slot.
Must not know: the scheduler, requests, PEFT's file format.
Invariants: a failed load changes nothing; a slot that is held is never rewritten; rows without an adapter get exactly
what the unwrapped model gives.

y_i = W x_i + B_s (A_s x_i), s the row's adapter; the scale is folded into B (Hu et al. 2021, section 4.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from izh.adapters.linear import AdapterEmbedding, AdapterLinear
from izh.adapters.peft import read_peft
from izh.adapters.sites import Site, decoder_sites, linear_sites, shapes_of
from izh.adapters.slots import SlotTable
from izh.adapters.weights import Adapter, ModuleDelta
from izh.errors import AdapterError
from izh.kernels.decoder import Corrections
from izh.kernels.lora import AdapterRows
from izh.kernels.ops import Ops
from izh.kernels.select import select
from izh.model.decoder import Decoder, Embedding
from izh.model.quantize import LowBitEmbedding, LowBitLinear

_KERNELS = {"torch": "reference", "cpu": "numba", "deterministic": "deterministic", "triton": "triton"}


def backend_of(kernels: str) -> str:
    """What a bank calls the kernels of this table (`izh/kernels/select.py`)."""
    return next(backend for backend, table in _KERNELS.items() if table == kernels)


def _projections(decoder: Decoder) -> list[tuple[AdapterLinear, ...]]:
    """Of each layer, wrapped: qkv, o, gate_up, down."""
    paths = "attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
    return [tuple(cast(AdapterLinear, layer.get_submodule(path)) for path in paths) for layer in decoder.layers]


class AdapterBank:
    """`capacity` slots of rank up to `max_rank` beside the linears of `flat` whose last name is in `targets`.

    Wraps them in place; a model has one bank. Of a `Decoder` every projection, the LM head and the token embedding can
    be adapted, whatever `targets` says. `backend` is "torch" (the definition), "cpu" (compiled kernels),
    "deterministic" (those, each row in one order of arithmetic) or "triton" (a model on a GPU; on CPU only in Triton's
    interpreter).

    By hand: `load` or `load_peft`; then for each forward `acquire`, `activate`, the forward, `release`. The engine
    decides slots in its gate and uses `write`.
    """

    def __init__(
        self,
        flat: nn.Module,
        capacity: int = 8,
        max_rank: int = 16,
        targets: Sequence[str] = ("q_proj", "v_proj"),
        backend: str = "torch",
    ) -> None:
        if backend not in _KERNELS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, _KERNELS))}, got {backend!r}")
        if capacity < 1 or max_rank < 1:
            raise ValueError(f"capacity and max_rank must be at least 1, got {capacity} and {max_rank}")
        sites = decoder_sites(flat) if isinstance(flat, Decoder) else linear_sites(flat, tuple(targets))
        if not sites:
            raise ValueError(f"the model has no linear named {', '.join(targets)}")
        self._device = next(flat.parameters()).device
        ops = select(self._device, _KERNELS[backend])
        self.max_rank = max_rank
        self.shapes = shapes_of(sites)
        self.slots = SlotTable(capacity)
        self._slots_of_rows: list[int] = []
        self._rows: AdapterRows | None = None
        self._content: list[bytes | None] = [None] * capacity  # the digest of the weights each slot holds
        self._named: dict[str, int] = {}
        self._wrapped: list[AdapterLinear | AdapterEmbedding] = []
        for site in sites:
            self._wrapped.append(self._wrap(site, capacity, ops))
        self._layers: list[tuple[AdapterLinear, ...]] = []
        if isinstance(flat, Decoder):
            self._layers = _projections(flat)
            flat.corrections = self.corrections
        self._corrections: Corrections | None = None
        self._has_corrections = False  # they are known, None included
        linears = [wrapped for wrapped in self._wrapped if isinstance(wrapped, AdapterLinear)]
        self._biased = {part.path for each in linears if each.base.bias is not None for part in each.parts}
        self._tables = {part.path for each in self._wrapped if each not in linears for part in each.parts}

    def _wrap(self, site: Site, capacity: int, ops: Ops) -> AdapterLinear | AdapterEmbedding:
        base = getattr(site.parent, site.name)
        if isinstance(base, AdapterLinear | AdapterEmbedding):
            raise ValueError("the model has an adapter bank already; a model has one")
        rows = self._current_rows
        wrapped: AdapterLinear | AdapterEmbedding
        if isinstance(base, Embedding | LowBitEmbedding):
            wrapped = AdapterEmbedding(base, site.parts[0].path, capacity, self.max_rank, ops, rows)
        else:
            assert isinstance(base, nn.Linear | LowBitLinear)
            wrapped = AdapterLinear(base, site.parts, capacity, self.max_rank, ops, rows)
        setattr(site.parent, site.name, wrapped)
        return wrapped

    def _current_rows(self) -> AdapterRows | None:
        return self._rows

    # -- slots by number: what the engine's stage uses ----------------------------------------------------------------

    def content(self, slot: int) -> bytes | None:
        """The digest of the weights that lie in the slot. Pure."""
        return self._content[slot]

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError naming the target that does not fit this bank."""
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"the adapter has rank {adapter.rank}, at most {self.max_rank} fits; raise --max-lora-rank"
            )
        for path, delta in adapter.deltas.items():
            if path not in self.shapes:
                raise AdapterError(f"{path} cannot be adapted here; it is not one of the model's targets")
            inputs, outputs = self.shapes[path]
            found = (delta.a.shape[1], delta.b.shape[0])
            if found != (inputs, outputs) or delta.a.shape[0] != delta.b.shape[1]:
                raise AdapterError(
                    f"{path}: A is {tuple(delta.a.shape)} and B {tuple(delta.b.shape)}; the model needs "
                    f"A [r, {inputs}] and B [{outputs}, r]"
                )
            self._check_more(path, delta)
            for name, tensor in delta.tensors().items():
                if not torch.isfinite(tensor).all():
                    raise AdapterError(f"{path}: {name} holds values that are not finite")

    def _check_more(self, path: str, delta: ModuleDelta) -> None:
        """What a delta has beside A and B."""
        inputs, outputs = self.shapes[path]
        is_table = path in self._tables
        if delta.bias is not None and path not in self._biased:
            raise AdapterError(f"{path}: the adapter trains a bias, but the model's linear has none")
        if delta.shift is not None and is_table:
            raise AdapterError(f"{path}: the adapter adds a bias, but an embedding has none")
        for name in ("bias", "magnitude", "shift"):
            tensor = getattr(delta, name)
            if tensor is not None and tensor.shape != (outputs,):
                raise AdapterError(f"{path}: {name} is {tuple(tensor.shape)}; the model needs {(outputs,)}")
        if delta.replaced is not None:
            if path in self._biased:
                raise AdapterError(f"{path}: the adapter replaces rows of a weight, whose linear has a bias")
            try:
                delta.replaced.check(*((inputs, outputs) if is_table else (outputs, inputs)))
            except AdapterError as error:
                raise AdapterError(f"{path}: {error}") from error

    @torch.inference_mode()
    def fit(self, adapter: Adapter) -> Adapter:
        """The adapter, checked, with all worked out that `write` needs: safe from any thread. Raises AdapterError."""
        self.check(adapter)
        gains = {
            part.path: wrapped.dora_gain(part, adapter.deltas[part.path])
            for wrapped in self._wrapped
            for part in wrapped.parts
            if part.path in adapter.deltas and adapter.deltas[part.path].magnitude is not None
        }
        return replace(adapter, gains=gains) if gains else adapter

    @torch.inference_mode()
    def write(self, slot: int, adapter: Adapter) -> None:
        """Put a fitted adapter's weights into a slot that no row of a running step uses."""
        self._content[slot] = None  # until it is whole
        self._has_corrections = False
        for wrapped in self._wrapped:
            wrapped.write(slot, adapter.deltas, adapter.gains)
        self._content[slot] = adapter.digest

    def activate(self, rows: Sequence[int] | Tensor, decode: bool = False) -> None:
        """The adapter slot of each row of the next forward, -1 for the base model. `decode` says that each row is a
        sequence's next token; the arithmetic does not depend on it."""
        slots = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        if slots != self._slots_of_rows:  # steps that decode are alike
            self._slots_of_rows, self._rows = slots, AdapterRows.of(slots, self._device)
            self._has_corrections = False

    def corrections(self) -> Corrections | None:
        """What the active rows add to a decoder's layers, None without adapters."""
        if not self._has_corrections:
            self._corrections, self._has_corrections = self._find_corrections(), True
        return self._corrections

    def _find_corrections(self) -> Corrections | None:
        rows = self._rows
        if rows is None:
            return None
        adapted = [[each if each.adapts(rows) else None for each in layer] for layer in self._layers]
        if not all(each is None or each.adds_only(rows) for layer in adapted for each in layer):
            return Corrections(rows, None)
        return Corrections(rows, [tuple(each and each.at_once for each in layer) for layer in adapted])

    # -- adapters by name: for direct use -----------------------------------------------------------------------------

    def load(self, name: str, weights: Mapping[str, tuple[Tensor, Tensor]], alpha: float) -> int:
        """Load A [r, K], B [D, r] of each target, scaled by alpha / r; returns the slot. Replaces an unleased adapter
        of the same name. Raises AdapterError before anything is changed."""
        deltas = {path: ModuleDelta(a.float(), b.float() * (alpha / a.shape[0])) for path, (a, b) in weights.items()}
        return self._load(name, Adapter(deltas))

    def load_peft(self, name: str, directory: str | Path) -> int:
        """Load an adapter as PEFT saves it; returns the slot. Raises AdapterError before anything is changed."""
        return self._load(name, read_peft(Path(directory), self.shapes))

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises AdapterError when it is leased or unknown."""
        slot = self._slot(name)
        if live := self.slots.holds(slot):
            raise AdapterError(f"adapter {name!r} is in use by {live} requests; it cannot be unloaded")
        del self._named[name]
        if slot not in self._named.values():
            self.slots.drop(self._digest(slot))

    def acquire(self, name: str) -> tuple[int, tuple[str, bytes]]:
        """Lease an adapter for one request: its slot, and what tells KV computed with it from any other."""
        slot = self._slot(name)
        digest = self._digest(slot)
        self.slots.take(digest)
        return slot, ("lora", digest)

    def release(self, slot: int) -> None:
        """Give one lease back. Once too often is a bug, and raises RuntimeError."""
        self.slots.release(slot)

    def _slot(self, name: str) -> int:
        if name not in self._named:
            raise AdapterError(f"no adapter {name!r} is loaded; loaded: {', '.join(sorted(self._named)) or 'none'}")
        return self._named[name]

    def _digest(self, slot: int) -> bytes:
        """What lies in the slot of a loaded adapter."""
        digest = self.slots.digest(slot)
        assert digest is not None
        return digest

    def _load(self, name: str, adapter: Adapter) -> int:
        if not adapter.deltas:
            raise AdapterError("the adapter has no weights")
        adapter = self.fit(adapter)
        old = self._named.get(name)
        if old is not None and (live := self.slots.holds(old)):
            raise AdapterError(f"adapter {name!r} is in use by {live} requests; it cannot be replaced")
        slot = self.slots.find(adapter.digest)
        others = {taken for other, taken in self._named.items() if other != name}
        if slot is None and len(others) == self.slots.capacity:
            raise AdapterError(f"all {self.slots.capacity} adapter slots are taken; unload one first")
        if old is not None and old != slot:
            self.unload(name)
        if slot is None:
            slot = self.slots.place(adapter.digest)
            self.write(slot, adapter)
        self._named[name] = slot
        return slot
