"""The tensors of a PEFT adapter, by module.

Owns: reading adapter_model.safetensors or .bin; what each tensor's name says; the check of each one's shape and values.
Must not know: the config, the model.
Invariant: no tensor of the file is dropped.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from izh.errors import AdapterError

PREFIX = "base_model.model."
TOKENS, COPY, WEIGHT, WEIGHT_AGAIN = "trained tokens", "copy of the base weight", "weight", "weight, once more"
ROWS = frozenset({TOKENS, COPY, WEIGHT, WEIGHT_AGAIN})
"""What a module's tensor may be that takes the place of base weights."""
_FIELDS = {  # the end of a tensor's name, less the adapter's: what it is; the first that fits counts
    "lora_A.weight": "lora a",
    "lora_B.weight": "lora b",
    "lora_B.bias": "lora b's bias",
    "lora_embedding_A": "lora a of an embedding",
    "lora_embedding_B": "lora b of an embedding",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "base_layer.bias": "bias",
    "bias": "bias of a module without A and B",
    "token_adapter.trainable_tokens_delta": TOKENS,
    "token_adapter.base_layer.weight": COPY,
    "original_module.weight": COPY,
    "base_layer.weight": COPY,
    "modules_to_save.weight": WEIGHT_AGAIN,
    "weight": WEIGHT,
}

Tensors = Mapping[str, Tensor]


def read_tensors(directory: Path) -> dict[str, dict[str, Tensor]]:
    """{module as PEFT calls it: {what: tensor}}. Embeddings' A [r, V] and B [D, r] read as a linear's.

    Raises AdapterError naming the file or the tensor."""
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _tensors(directory).items():
        name = _without_adapter_name(key)
        end = next((end for end in _FIELDS if name.endswith(f".{end}")), None)
        if not key.startswith(PREFIX) or end is None:
            raise AdapterError(f"tensor {key} is not a LoRA weight that izh knows")
        module = modules.setdefault(name.removeprefix(PREFIX).removesuffix(f".{end}"), {})
        if _FIELDS[end] in module:
            raise AdapterError(f"tensor {key} is there twice, under two spellings")
        module[_FIELDS[end]] = tensor
    if not modules:
        raise AdapterError("the adapter has no weights")
    return modules


def checked(key: str, what: str, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
    """The tensor of module `key` in float32. Raises AdapterError for one that is missing, of another shape or no finite
    numbers."""
    if what not in tensors:
        raise AdapterError(f"{key}: {what} is missing")
    tensor = tensors[what]
    if tuple(tensor.shape) != shape:
        raise AdapterError(f"{key}: {what} is {tuple(tensor.shape)}, expected {shape}")
    if not tensor.is_floating_point():
        raise AdapterError(f"{key}: {what} is {tensor.dtype}, expected floating point")
    tensor = tensor.detach().to(torch.float32).contiguous()
    if not torch.isfinite(tensor).all():
        raise AdapterError(f"{key}: {what} holds values that are not finite")
    return tensor


def _without_adapter_name(key: str) -> str:
    """ "...lora_A.default.weight", as in a state dict of the running model, becomes "...lora_A.weight"."""
    for end in ("", ".weight", ".bias"):
        if key.endswith(f".default{end}"):
            return key.removesuffix(f".default{end}") + end
    return key


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
