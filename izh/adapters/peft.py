"""Adapters as PEFT saves them.

Owns: `read_peft`: a directory becomes an Adapter whose effective weights are exactly what PEFT computes with.
Must not know: slots, the model's modules (the caller says which linears there are).
Invariant: every tensor of the file is used, and every module that the config targets has its tensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from izh.adapters.peft_config import PeftConfig
from izh.adapters.weights import Adapter, ModuleDelta
from izh.errors import AdapterError

_PREFIX = "base_model.model."
_ROOTS = ("model.language_model.", "language_model.model.", "model.", "")
_KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}


def read_peft(directory: Path, shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read an adapter for a model whose linears are `shapes`: path -> (inputs, outputs), such as
    "layers.3.self_attn.q_proj". Raises AdapterError naming the file, the key or the field at fault."""
    config = PeftConfig.read(_json(directory / "adapter_config.json"))
    found = _by_module(_tensors(directory))
    root = _root(found, shapes)
    deltas = {}
    for key, tensors in found.items():
        path = key.removeprefix(root)
        if path not in shapes:
            raise AdapterError(f"{key} is no linear of this model; is the adapter made for another one?")
        if not config.targets(key):
            raise AdapterError(f"{key} has weights, but adapter_config.json does not target it")
        deltas[path] = _delta(key, tensors, config, *shapes[path])
    missing = [root + path for path in shapes if config.targets(root + path) and path not in deltas]
    if missing:
        raise AdapterError(
            f"adapter_config.json targets {len(missing)} modules without weights, the first {missing[0]}"
        )
    return Adapter(deltas)


def _delta(key: str, tensors: Mapping[str, Tensor], config: PeftConfig, inputs: int, outputs: int) -> ModuleDelta:
    rank = config.rank(key)
    expected: dict[str, tuple[int, ...]] = {"a": (rank, inputs), "b": (outputs, rank)}
    if config.use_dora:
        expected["magnitude"] = (outputs,)
    for name, shape in expected.items():
        if name not in tensors:
            raise AdapterError(f"{key}: lora {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise AdapterError(f"{key}: lora {name} is {tuple(tensors[name].shape)}, expected {shape}")
        if not torch.isfinite(tensors[name]).all():
            raise AdapterError(f"{key}: lora {name} holds values that are not finite")
    if extra := set(tensors) - set(expected):
        raise AdapterError(f"{key}: {', '.join(sorted(extra))} found, but use_dora is false")
    b = tensors["b"].float() * config.scale(key)
    magnitude = tensors["magnitude"].float() if config.use_dora else None
    return ModuleDelta(tensors["a"].float(), b, magnitude=magnitude)


def _by_module(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{module as PEFT calls it: {"a": ..., "b": ...}}. Embeddings' A [r, V] and B [D, r] read as a linear's."""
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind = next((kind for kind in _KINDS if key.endswith(f".{kind}")), None)
        if key.endswith((".base_layer.weight", "embed_tokens.weight", "lm_head.weight")):
            raise AdapterError(
                f"tensor {key} is a copy of a base weight, which may differ from the served one; save the adapter with "
                "save_pretrained(..., save_embedding_layers=False)"
            )
        if not key.startswith(_PREFIX) or kind is None:
            raise AdapterError(f"tensor {key} is not a LoRA weight that izh knows")
        module = key.removeprefix(_PREFIX).removesuffix(f".{kind}")
        modules.setdefault(module, {})[_KINDS[kind]] = tensor
    if not modules:
        raise AdapterError("the adapter has no weights")
    return modules


def _root(modules: Mapping[str, object], shapes: Mapping[str, object]) -> str:
    """What the checkpoint puts before "layers.": the first spelling under which a module of the adapter is known."""
    for root in _ROOTS:
        if any(key.startswith(root) and key.removeprefix(root) in shapes for key in modules if key != "lm_head"):
            return root
    return "model."


def _tensors(directory: Path) -> dict[str, Tensor]:
    file = directory / "adapter_model.safetensors"
    try:
        if file.is_file():
            return load_file(file)
        file = directory / "adapter_model.bin"
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise AdapterError(f"{directory}: has neither adapter_model.safetensors nor adapter_model.bin") from None
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise AdapterError(f"{file}: cannot be read: {error}") from error


def _json(file: Path) -> dict[str, object]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"{file.parent}: has no adapter_config.json, so it is no PEFT adapter") from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file}: cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{file}: must hold a JSON object")
    return fields
