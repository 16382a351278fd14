"""Class scores of a pooled row, as each family of sequence classifiers makes them.

Owns: ClassificationHead.
Must not know: how rows were pooled, what the scores mean.
"""

import torch
from torch import Tensor

from izh.kernels.ops import FrozenLinear, Ops
from izh.model.encoders.encoder import Norm, take_linear
from izh.model.encoders.spec import EncoderSpec
from izh.model.encoders.tensors import EncoderTensors

_NAMES = {  # the family's names of the layer before the last, and of the last
    "bert": ("pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "modernbert": ("head.dense", "classifier"),
}


class ClassificationHead:
    """pooled [S, D] -> logits [S, num_labels]: a hidden layer, tanh (or activation and norm), the classifier."""

    def __init__(self, spec: EncoderSpec, num_labels: int, tensors: EncoderTensors, ops: Ops) -> None:
        """Takes the head's tensors out of `tensors`. Raises ModelLoadError naming the tensor at fault."""
        hidden, last = _NAMES[spec.head]
        self.hidden: FrozenLinear = take_linear(
            tensors, [hidden], spec.hidden_size, spec.hidden_size, spec.has_head_bias, ops
        )
        self.norm = Norm(tensors, "head.norm", spec, ops) if spec.head == "modernbert" else None
        self.last: FrozenLinear = take_linear(tensors, [last], num_labels, spec.hidden_size, True, ops)
        self.activation = spec.head_activation

    @torch.inference_mode()
    def __call__(self, pooled: Tensor) -> Tensor:
        hidden = self.hidden(pooled, self.activation)
        return self.last(hidden.tanh() if self.norm is None else self.norm(hidden))
