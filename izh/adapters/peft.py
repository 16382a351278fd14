"""Adapters as PEFT saves them.

Owns: `read_peft`: a directory becomes an Adapter whose effective weights are exactly what PEFT computes with.
Must not know: slots, the model's modules (the caller says which linears there are).
Invariant: every tensor of the file is used, and every module that the config targets has its tensors.
"""

import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from izh.adapters.peft_config import PeftConfig
from izh.adapters.weights import Adapter, ModuleDelta
from izh.errors import AdapterError

log = logging.getLogger("izh.adapters")

_PREFIX = "base_model.model."
_FIELDS = {  # the end of a tensor's name, less the adapter's: what it is
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a of an embedding",
    "lora_embedding_B": "b of an embedding",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "base_layer.bias": "bias",
    "bias": "bias of a module without A and B",
}
_BASE_COPIES = ("base_layer.weight", "embed_tokens.weight", "lm_head.weight")
_ROOTS = (  # what a checkpoint puts before "layers." and "embed_tokens", and before "lm_head"; None: it has no head
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
    ("model.", ""),
    ("", None),
)


def read_peft(directory: Path, targets: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read an adapter for a model whose linears are `targets`: path -> (inputs, outputs), such as
    "layers.3.self_attn.q_proj". A bias that the file does not hold is the base's own. Logs what was read.

    Raises AdapterError naming the directory, the file, and the key or the field at fault.
    """
    try:
        config = PeftConfig.read(_json(directory / "adapter_config.json"))
        adapter = _adapter(config, _by_module(_tensors(directory)), targets)
    except AdapterError as error:
        raise AdapterError(f"adapter {directory}: {error}") from error
    log.info("adapter %s: %s", directory, "; ".join(adapter.report()))
    return adapter


def _adapter(
    config: PeftConfig, found: Mapping[str, Mapping[str, Tensor]], targets: Mapping[str, tuple[int, int]]
) -> Adapter:
    keys = _keys(found, targets)
    if strange := [key for key in found if key not in keys]:
        raise AdapterError(f"{strange[0]} is no linear of this model; is the adapter made for another one?")
    deltas, scales = {}, {}
    for key, tensors in found.items():
        path = keys[key]
        if config.targets(key):
            deltas[path] = _delta(key, tensors, config, *targets[path], is_embedding=path == "embed_tokens")
            scales[path] = config.scale(key)
            if (field := config.ambiguous(key)) is not None:
                log.warning(
                    "%s matches several patterns of %s; PEFT uses the first in the file, so izh does", key, field
                )
        else:
            deltas[path] = _bias_alone(key, tensors, config, *targets[path])
    if missing := [key for key, path in keys.items() if config.targets(key) and path not in deltas]:
        raise AdapterError(
            f"adapter_config.json targets {len(missing)} modules without weights, the first {missing[0]}"
        )
    if not scales:
        raise AdapterError("adapter_config.json targets no linear of this model")
    return Adapter(deltas, scales)


def _delta(
    key: str, tensors: Mapping[str, Tensor], config: PeftConfig, inputs: int, outputs: int, *, is_embedding: bool
) -> ModuleDelta:
    rank, kind = config.rank(key), " of an embedding" if is_embedding else ""
    shapes: dict[str, tuple[int, ...]] = {f"a{kind}": (rank, inputs), f"b{kind}": (outputs, rank)}
    if config.use_dora:
        shapes["magnitude"] = (outputs,)
    if config.trains_bias(key) and "bias" in tensors:
        shapes["bias"] = (outputs,)
    _check(key, tensors, shapes, f"use_dora is {config.use_dora} and bias {config.bias!r}")
    b = _float(tensors[f"b{kind}"]) * config.scale(key)
    if not torch.isfinite(b).all():
        raise AdapterError(f"{key}: scaled by {config.scale(key):g}, b holds values that are not finite")
    more = {name: _float(tensors[name]) for name in ("bias", "magnitude") if name in shapes}
    return ModuleDelta(_float(tensors[f"a{kind}"]), b, **more)


def _bias_alone(key: str, tensors: Mapping[str, Tensor], config: PeftConfig, inputs: int, outputs: int) -> ModuleDelta:
    """With bias = "all" PEFT trains the biases of all modules, also of those without A and B."""
    name = "bias of a module without A and B"
    if name not in tensors or not config.trains_bias(key):
        raise AdapterError(f"{key} has weights, but adapter_config.json does not target it")
    _check(key, tensors, {name: (outputs,)}, "adapter_config.json does not target the module")
    return ModuleDelta(torch.zeros(0, inputs), torch.zeros(outputs, 0), bias=_float(tensors[name]))


def _check(key: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], why: str) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise AdapterError(f"{key}: lora {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise AdapterError(f"{key}: lora {name} is {tuple(tensors[name].shape)}, expected {shape}")
        if not tensors[name].is_floating_point():
            raise AdapterError(f"{key}: lora {name} is {tensors[name].dtype}, expected floating point")
        if not torch.isfinite(_float(tensors[name])).all():
            raise AdapterError(f"{key}: lora {name} holds values that are not finite")
    if extra := sorted(set(tensors) - set(shapes)):
        raise AdapterError(f"{key}: {', '.join(extra)} found, but {why}")


def _float(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def _by_module(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{module as PEFT calls it: {what of `_FIELDS`: tensor}}. Embeddings' A [r, V] and B [D, r] read as a linear's."""
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name = _without_adapter_name(key)
        end = next((end for end in _FIELDS if name.endswith(f".{end}")), None)
        if name.endswith(_BASE_COPIES):
            raise AdapterError(
                f"tensor {key} is a copy of a base weight, which may differ from the served one; save the adapter with "
                "save_pretrained(..., save_embedding_layers=False)"
            )
        if not key.startswith(_PREFIX) or end is None:
            raise AdapterError(f"tensor {key} is not a LoRA weight that izh knows")
        module = modules.setdefault(name.removeprefix(_PREFIX).removesuffix(f".{end}"), {})
        if _FIELDS[end] in module:
            raise AdapterError(f"tensor {key} is there twice, under two spellings")
        module[_FIELDS[end]] = tensor
    if not modules:
        raise AdapterError("the adapter has no weights")
    return modules


def _without_adapter_name(key: str) -> str:
    """ "...lora_A.default.weight", as in a state dict of the running model, becomes "...lora_A.weight"."""
    for end in ("", ".weight"):
        if key.endswith(f".default{end}"):
            return key.removesuffix(f".default{end}") + end
    return key


def _keys(modules: Mapping[str, object], targets: Mapping[str, object]) -> dict[str, str]:
    """{what the adapter calls a linear: what this model calls it}, by the spelling that fits most modules."""
    spellings = []
    for root, head in _ROOTS:
        keys = {root + path: path for path in targets if path != "lm_head"}
        if head is not None and "lm_head" in targets:
            keys[f"{head}lm_head"] = "lm_head"
        spellings.append(keys)
    return max(spellings, key=lambda keys: sum(key in keys for key in modules))


def _tensors(directory: Path) -> dict[str, Tensor]:
    file = directory / "adapter_model.safetensors"
    try:
        if file.is_file():
            return load_file(file)
        file = directory / "adapter_model.bin"
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise AdapterError("has neither adapter_model.safetensors nor adapter_model.bin") from None
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise AdapterError(f"{file.name}: cannot be read: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, Tensor) for each in tensors.values()):
        raise AdapterError(f"{file.name}: must hold tensors by name")
    return tensors


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
