"""Small layers that some embedding models put after pooling, as sentence-transformers stores them.

Owns: Dense and LayerNorm, loaded from a module's own directory.
Must not know: pooling, encoders, modules.json.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from izh.errors import ModelLoadError

_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU, "ReLU": nn.ReLU, "Sigmoid": nn.Sigmoid}
_ACTIVATIONS |= {"SiLU": nn.SiLU}


def activation_of(path: str, where: Path) -> nn.Module:
    """The activation that a dotted name of torch's stands for. Raises ModelLoadError for one that is not known here."""
    name = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"{where}: activation {path!r} is not supported; supported are torch's own {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]()


class Dense:
    """x [S, K] -> activation(x W^T + b) [S, N], plus x, or x R^T where the widths differ, for a residual one."""

    def __init__(self, directory: Path) -> None:
        path = directory / "config.json"
        config = read_json(path)
        known = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
        both = {"module_input_name", "module_output_name"}
        if any(config.get(name) not in (None, "sentence_embedding") for name in both):
            raise ModelLoadError(f"{path}: a dense layer over anything but the sentence embedding is not supported")
        if unknown := set(config) - known - both:
            raise ModelLoadError(f"{path}: {', '.join(sorted(unknown))} is not supported")
        inputs, outputs = config["in_features"], config["out_features"]
        tensors = _Tensors(directory)
        self.weight = tensors.take("linear.weight", outputs, inputs)
        self.bias = tensors.take("linear.bias", outputs) if config.get("bias", True) else None
        self.activation = activation_of(config.get("activation_function", "torch.nn.Tanh"), path)
        self.residual: Tensor | None = None
        self.is_residual: bool = config.get("use_residual", False)
        if self.is_residual and inputs != outputs:
            self.residual = tensors.take("residual.weight", outputs, inputs)

    def __call__(self, x: Tensor) -> Tensor:
        out = self.activation(F.linear(x, self.weight, self.bias))
        if not self.is_residual:
            return out
        return out + (x if self.residual is None else F.linear(x, self.residual))


class LayerNorm:
    """x [S, N] -> its layer norm, with torch's default epsilon."""

    def __init__(self, directory: Path) -> None:
        self.size = read_json(directory / "config.json")["dimension"]
        tensors = _Tensors(directory)
        self.weight = tensors.take("norm.weight", self.size)
        self.bias = tensors.take("norm.bias", self.size)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias)


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises ModelLoadError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error


class _Tensors:
    def __init__(self, directory: Path) -> None:
        from safetensors.torch import load_file

        self.path = directory / "model.safetensors"
        try:
            if self.path.is_file():
                self.tensors = load_file(self.path)
            else:  # how they were stored before safetensors
                self.path = directory / "pytorch_model.bin"
                self.tensors = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # either library raises kinds of its own for a malformed file
            raise ModelLoadError(f"{self.path}: cannot be read: {error}") from error

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise ModelLoadError(f"{self.path}: tensor {name!r} {found}, the config asks for {list(shape)}")
        return tensor.float()
