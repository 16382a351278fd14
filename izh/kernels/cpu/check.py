"""The border of the CPU kernels: what a tensor must be before its address is handed over.

Owns: `check`. Must not know: any op.
It costs about half a microsecond a tensor, because it looks at the tensor's description only, never at its contents.
"""

import torch
from torch import Tensor


def check(name: str, tensor: Tensor, dtype: torch.dtype, dims: int, contiguous: bool = False) -> torch.Size:
    """The shape of a tensor on CPU with this dtype and number of dimensions, contiguous at least in its last one.

    Raises: ValueError naming the argument.
    """
    shape = tensor.shape
    if tensor.dtype is not dtype or not tensor.is_cpu or len(shape) != dims:
        raise ValueError(
            f"{name}: {tensor.dtype} {tuple(shape)} on {tensor.device}; the CPU kernel takes {dims} dimensions of "
            f"{dtype} on cpu (kernels=reference takes any dtype)"
        )
    if not tensor.is_contiguous() and (contiguous or (shape[-1] > 1 and tensor.stride(-1) != 1)):
        raise ValueError(f"{name}: strides {tensor.stride()} for shape {tuple(shape)}; call .contiguous() first")
    return shape
