"""A checkpoint's tensors by name, each taken once.

Owns: EncoderTensors.
Must not know: what the tensors are for.
Invariant: a tensor that is missing, of the wrong shape, or left over without being a known part of something else is
an error that names it.
"""

import torch
from torch import Tensor

from izh.errors import ModelLoadError
from izh.model.weights import TensorSource

_PREFIXES = ("bert.", "roberta.", "model.")
_OTHER_PARTS = ("pooler.", "cls.", "lm_head.", "classifier.", "head.", "decoder.")
"""Heads of other tasks, which an encoder does without."""
_BUFFERS = ("position_ids", "token_type_ids", "inv_freq")


class EncoderTensors:
    """Tensors as float32, under their names without the model's prefix."""

    def __init__(self, source: TensorSource) -> None:
        self.label = source.label
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in source.tensors():
            bare = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
            # What the first BERT checkpoints call the weight and bias of a norm.
            bare = bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            if bare in self._tensors:
                raise ModelLoadError(f"{self.label}: tensor {name!r} comes twice")
            self._tensors[bare] = tensor

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, in memory of its own. Raises ModelLoadError when it is missing or not of this shape."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelLoadError(f"{self.label}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{self.label}: tensor {name!r} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
            )
        return tensor.to(torch.float32, copy=True)

    def finish(self) -> None:
        """Raise ModelLoadError for what was not taken, unless it belongs to another task's head."""
        for name in self._tensors:
            if not name.startswith(_OTHER_PARTS) and not name.endswith(_BUFFERS):
                raise ModelLoadError(f"{self.label}: tensor {name!r} has no place in this encoder")
