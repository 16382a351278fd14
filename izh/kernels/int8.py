"""Linear layers with weights of 8 bits: the arithmetic, in plain PyTorch.

Owns: how weights and activations become integers, `quantize_linear` (the op of that name, by definition).
Must not know: models, how the CPU's kernel lays weights out; it gives these numbers to the last bit.
Invariant: a row's result depends on that row and the weights alone, and is the same on every machine: sums within a
group are of integers, none can overflow, and groups are added in order.

    weight    w[n, k] = s[n, g] q[n, k]     g = k / GROUP; s[n, g] = max over k in g of |w[n, k]| / 127
    row       x[k]    = t p[k]              t = max over k of |x[k]| / 32767
    result    y[n]    = t (sum over g of s[n, g] (sum over k in g of p[k] q[n, k])) + bias[n]

Activations have 16 bits: products of 16 bits by 16 are what AVX2 multiplies fastest without saturating, and one scale
for a whole row of a model's activations, with their few large ones, is too coarse for 8. What the perplexity of
SmolLM2-135M-Instruct on the text of `izh bench perplexity` grows by:
weights, a scale for each     row    row    row     row                           group
activations                   float  16 bit 8 bit   8 bit, a scale for each 64    16 bit
                              1.1 %  1.1 %  6.8 %   1.7 %                         -0.1 %
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from izh.kernels.ops import Activation, QuantizedLinear

GROUP = 64
"""Neighbours in a row of weights that share a scale."""
TOP = 2**15 - 1
"""The largest magnitude of an activation's whole number: GROUP * 127 * TOP is less than 2^31."""
LEAST = 1e-30
"""What the largest of some magnitudes is taken to be at least, so that zeros need no case of their own."""
_TOP_WEIGHT = 127

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> q [N, K] int8, s [N, G] float32."""
    width = weight.shape[1]
    groups = F.pad(weight.detach().float(), (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2).clamp_min(LEAST) * (1 / _TOP_WEIGHT)
    return (groups / scales[:, :, None]).round_().to(torch.int8).flatten(1)[:, :width].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """q [n, K], s [n, G] -> w [n, K] float32."""
    return codes.float() * scales.repeat_interleave(GROUP, 1)[:, : codes.shape[1]]


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] float32 -> p [T, K] float32, whole numbers, and t [T]; t of a row that is not finite is not a number."""
    largest = x.abs().amax(1).clamp_min(LEAST)
    factor = torch.full_like(largest, TOP) / largest  # a number over a tensor would be its reciprocal times the number
    codes = (x * factor[:, None]).round_()
    return codes.nan_to_num(0.0), torch.where(largest.isfinite(), largest * (1 / TOP), torch.nan)


class _Int8Linear:
    """See `Ops.quantize_linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._codes, self._scales = quantize_weight(weight)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor, activation: Activation = "none") -> Tensor:
        codes, row_scales = quantize_activations(x.float())
        total = x.new_zeros((len(x), len(self._codes)), dtype=torch.float32)
        for g, (p, q) in enumerate(zip(codes.split(GROUP, 1), self._codes.split(GROUP, 1), strict=True)):
            total += (p.double() @ q.T.double()).float() * self._scales[:, g]  # the sums are exact
        y = total * row_scales[:, None]
        return ACTIVATIONS[activation](y if self._bias is None else y + self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return dequantize(self._codes[ids], self._scales[ids])

    def holds(self, weight: Tensor) -> bool:
        codes, scales = quantize_weight(weight)
        return torch.equal(codes, self._codes) and torch.equal(scales, self._scales)


def quantize_linear(weight: Tensor, bias: Tensor | None) -> QuantizedLinear:
    """The op of the same name in `ops.py`."""
    return _Int8Linear(weight, bias)
