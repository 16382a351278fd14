"""Models of transformers and PEFT whose linear layers round what they are given as `izh/kernels/quantized.py` says.

A number on the edge between two codes may fall to either side in other arithmetic, which makes a difference of one
code: bounds against these models allow for some, far below what not rounding makes.
"""

import torch
from torch import nn

from izh.kernels.quantized import quantize_activations


def round_activations(model: nn.Module) -> None:
    """Of every linear layer but those that an adapter brings."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not {"lora_A", "lora_B", "modules_to_save"} & set(path.split(".")):
            module.register_forward_pre_hook(_rounded)


def _rounded(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = inputs
    codes, scales = quantize_activations(x.float().flatten(0, -2))
    return ((codes * scales[..., None]).flatten(1)[:, : x.shape[-1]].view(x.shape).to(x.dtype),)
