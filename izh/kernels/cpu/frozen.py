"""Linear layers whose weights are laid out once for the machine's matrix units, for models that are never changed.

Owns: `freeze_linear`, on oneDNN, which torch brings.
Must not know: models. The frozen copy is the only one: whoever freezes a weight lets go of it.
Invariant: a row's numbers do not depend on how many rows there are, to the last bit from AVX2 on; on a machine without
it, where oneDNN has another product, to 1e-6.

Microseconds, frozen with GELU inside / F.linear then F.gelu, 1536 x 384, median of 15 on 2 cores of a Zen 5, where
torch's own product (MKL) leaves AVX-512 unused; then both held to AVX2:
rows       1         8          16         64         512          2048
           33 / 44   52 / 128   73 / 173   186 / 436  1334 / 4757  5353 / 18808
AVX2       32 / 44   75 / 118   118 / 166  393 / 441  2977 / 4659  12076 / 19000
"""

import torch
from torch import Tensor

from izh.kernels.ops import Activation, FrozenLinear
from izh.kernels.reference import freeze_linear as freeze_with_torch

_ROWS = 256  # what the layout is chosen for; measured equally good from 1 to 4096 rows
_POINTWISE = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}


def freeze_linear(weight: Tensor, bias: Tensor | None) -> FrozenLinear:
    """See `Ops.freeze_linear`; other dtypes than float32, and torch without oneDNN, run as the reference does."""
    if weight.dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return freeze_with_torch(weight, bias)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"weight: shape {tuple(weight.shape)} with a bias of {None if bias is None else bias.shape}")
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
    width = weight.shape[1]

    def apply(x: Tensor, activation: Activation = "none") -> Tensor:
        if x.dim() != 2 or x.shape[1] != width or x.dtype is not torch.float32:
            raise ValueError(f"x: {x.dtype} {tuple(x.shape)}; this layer takes float32 rows of {width}")
        name, algorithm = _POINTWISE[activation]
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm)

    return apply
