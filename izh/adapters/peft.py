"""Adapters as PEFT saves them.

Owns: `read_peft`: a directory becomes an Adapter whose effective weights are exactly what PEFT computes with.
Must not know: slots, the model's modules (the caller says which linears there are).
Invariant: every tensor of the file is used, and every module that the config targets has its tensors.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from izh.adapters.peft_config import PeftConfig
from izh.adapters.peft_rows import replaced_rows
from izh.adapters.peft_tensors import ROWS, Tensors, checked, read_tensors
from izh.adapters.rows import ReplacedRows
from izh.adapters.sites import Targets
from izh.adapters.weights import Adapter, ModuleDelta
from izh.errors import AdapterError

log = logging.getLogger("izh.adapters")

_ROOTS = (  # what a checkpoint puts before "layers." and "embed_tokens", and before "lm_head"; None: it has no head
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
    ("model.", ""),
    ("", None),
)


def read_peft(directory: Path, targets: Targets) -> Adapter:
    """Read an adapter for a model with these targets. A bias that the file does not hold is the base's own, and so is a
    copy of a base weight that equals it. Logs what was read.

    Raises AdapterError naming the directory, the file, and the key or the field at fault.
    """
    try:
        config = PeftConfig.read(_json(directory / "adapter_config.json")).of(is_tied=targets.is_tied)
        adapter = _adapter(config, read_tensors(directory), targets)
    except AdapterError as error:
        raise AdapterError(f"adapter {directory}: {error}") from error
    log.info("adapter %s: %s", directory, "; ".join(adapter.report()))
    return adapter


def _adapter(config: PeftConfig, found: Mapping[str, Tensors], targets: Targets) -> Adapter:
    keys = _keys(found, targets)
    if strange := [key for key in found if key not in keys]:
        raise AdapterError(f"{strange[0]} is no linear of this model; is the adapter made for another one?")
    deltas, scales = {}, {}
    for key, all_tensors in found.items():
        path = keys[key]
        tensors = {what: tensor for what, tensor in all_tensors.items() if what not in ROWS}
        if config.targets(key):
            deltas[path] = _delta(key, tensors, config, *targets[path], is_embedding=path == "embed_tokens")
            scales[path] = config.scale(key)
            if (field := config.ambiguous(key)) is not None:
                log.warning(
                    "%s matches several patterns of %s; PEFT uses the first in the file, so izh does", key, field
                )
        elif tensors:
            deltas[path] = _bias_alone(key, tensors, config, *targets[path])
    if missing := [key for key, path in keys.items() if config.targets(key) and path not in scales]:
        raise AdapterError(
            f"adapter_config.json targets {len(missing)} modules without weights, the first {missing[0]}"
        )
    if not scales:
        raise AdapterError("adapter_config.json targets no linear of this model")
    replacing = {key: {what: each[what] for what in ROWS & each.keys()} for key, each in found.items()}
    rows = replaced_rows(config, {key: tensors for key, tensors in replacing.items() if tensors}, keys, targets)
    return Adapter(
        deltas | {path: _with_rows(deltas.get(path), each, *targets[path]) for path, each in rows.items()}, scales
    )


def _delta(
    key: str, tensors: Tensors, config: PeftConfig, inputs: int, outputs: int, *, is_embedding: bool
) -> ModuleDelta:
    rank, kind = config.rank(key), " of an embedding" if is_embedding else ""
    shapes: dict[str, tuple[int, ...]] = {f"lora a{kind}": (rank, inputs), f"lora b{kind}": (outputs, rank)}
    if config.lora_bias:
        shapes["lora b's bias"] = (outputs,)
    if config.use_dora:
        shapes["magnitude"] = (outputs,)
    if config.trains_bias(key) and "bias" in tensors:
        shapes["bias"] = (outputs,)
    why = f"use_dora is {config.use_dora}, lora_bias {config.lora_bias} and bias {config.bias!r}"
    read = _all(key, tensors, shapes, why)
    more = {}
    for name in (f"lora b{kind}", "lora b's bias") if config.lora_bias else (f"lora b{kind}",):
        more[name] = read[name] * config.scale(key)
        if not torch.isfinite(more[name]).all():
            raise AdapterError(f"{key}: scaled by {config.scale(key):g}, {name} holds values that are not finite")
    return ModuleDelta(
        read[f"lora a{kind}"],
        more[f"lora b{kind}"],
        bias=read.get("bias"),
        magnitude=read.get("magnitude"),
        shift=more.get("lora b's bias"),
    )


def _bias_alone(key: str, tensors: Tensors, config: PeftConfig, inputs: int, outputs: int) -> ModuleDelta:
    """With bias = "all" PEFT trains the biases of all modules, also of those without A and B."""
    name = "bias of a module without A and B"
    if name not in tensors or not config.trains_bias(key):
        raise AdapterError(f"{key} has weights, but adapter_config.json does not target it")
    bias = _all(key, tensors, {name: (outputs,)}, "adapter_config.json does not target the module")[name]
    return ModuleDelta(torch.zeros(0, inputs), torch.zeros(outputs, 0), bias=bias)


def _with_rows(delta: ModuleDelta | None, rows: ReplacedRows, inputs: int, outputs: int) -> ModuleDelta:
    alone = ModuleDelta(torch.zeros(0, inputs), torch.zeros(outputs, 0))
    return replace(delta or alone, row_ids=rows.ids, rows=rows.values)


def _all(key: str, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], why: str) -> dict[str, Tensor]:
    """The tensors of these shapes, of which there must be no others."""
    read = {name: checked(key, name, tensors, shape) for name, shape in shapes.items()}
    if extra := sorted(set(tensors) - set(shapes)):
        raise AdapterError(f"{key}: {', '.join(extra)} found, but {why}")
    return read


def _keys(modules: Mapping[str, object], targets: Mapping[str, object]) -> dict[str, str]:
    """{what the adapter calls a linear: what this model calls it}, by the spelling that fits most modules."""
    spellings = []
    for root, head in _ROOTS:
        keys = {root + path: path for path in targets if path != "lm_head"}
        if head is not None and "lm_head" in targets:
            keys[f"{head}lm_head"] = "lm_head"
        spellings.append(keys)
    return max(spellings, key=lambda keys: sum(key in keys for key in modules))


def _json(file: Path) -> dict[str, object]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError("has no adapter_config.json, so it is no PEFT adapter") from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file.name}: cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{file.name}: must hold a JSON object")
    return fields
