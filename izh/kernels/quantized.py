"""Linear layers with weights of 8 or 4 bits: the arithmetic, in plain PyTorch.

Owns: how weights and activations become integers (`FORMS`), `quantize_linear` (the op of that name, by definition).
Must not know: models, how the CPU's kernel lays weights out; it gives these numbers to the last bit.
Invariant: a row's result depends on that row and the weights alone, and is the same on every machine: sums within a
group are of integers, none can overflow, and groups are added in order.

    weight    w[n, k] = s[n, g] q[n, k] + m[n, g]     g = k / group
    int8      group 64, q in -127 .. 127, s = max over k in g of |w[n, k]| / 127 in float32, no m
    int4      group 32, q in 0 .. 15, m = min over k in g of w[n, k], s = (max - m) / 15, both in float16
    row       x[k]    = t p[k]              t = max over k of |x[k]| / 32767
    result    y[n]    = t (sum over g of (s[n, g] (sum over k in g of p[k] q[n, k])
                                          + m[n, g] (sum over k in g of p[k]))) + bias[n]

Activations have 16 bits: products of 16 bits by 16 are what AVX2 multiplies fastest without saturating, and one scale
for a whole row of a model's activations, with their few large ones, is too coarse for 8. What the perplexity of
SmolLM2-135M-Instruct on the text of `izh bench perplexity` grows by in 8 bits:
weights, a scale for each     row    row    row     row                           group
activations                   float  16 bit 8 bit   8 bit, a scale for each 64    16 bit
                              1.1 %  1.1 %  6.8 %   1.7 %                         -0.1 %
The form of 4 bits is that of GGUF's Q4_1: a weight that comes from there is held as it is, to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from izh.kernels.ops import Activation, QuantizedLinear

TOP = 2**15 - 1
"""The largest magnitude of an activation's whole number: a group's products with it add up to less than 2^31."""
LEAST = 1e-30
"""What the largest of some magnitudes is taken to be at least, so that zeros need no case of their own."""
_TOP_8, _TOP_4 = 127, 15

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Form:
    """How weights are held. `group` neighbours in a row share a scale."""

    bits: Literal[8, 4]
    group: int

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> q [N, K] int8; and [N, G, 1] float32: s, or [N, G, 2] float16: s and m.

        Raises: ValueError where float16 holds no s or m.
        """
        weight = weight.detach().float()
        width = weight.shape[1]
        filled = torch.cat([weight, weight[:, -1:].expand(-1, -width % self.group)], 1)  # the last group's range stays
        groups = filled.unflatten(1, (-1, self.group))
        if self.bits == 8:
            scales = groups.abs().amax(2, keepdim=True).clamp_min(LEAST) * (1 / _TOP_8)
            codes = groups / scales
        else:
            least, largest = groups.amin(2), groups.amax(2)
            scales = torch.stack([(largest - least) * (1 / _TOP_4), least], 2).half()
            if not scales.isfinite().all():
                raise ValueError(f"weight: {weight.abs().max():g} is beyond what 4 bits hold, 65504; take 8")
            s, m = scales.float().split(1, 2)
            codes = ((groups - m) / s.masked_fill(s == 0, 1)).clamp(0, _TOP_4)
        return codes.round_().to(torch.int8).flatten(1)[:, :width].contiguous(), scales

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """q [n, K], s or s and m [n, G, 1 or 2] -> w [n, K] float32."""
        of_each = scales.float().repeat_interleave(self.group, 1)[:, : codes.shape[1]]
        weight = codes * of_each[..., 0]
        return weight if self.bits == 8 else weight + of_each[..., 1]


FORMS = {"int8": Form(bits=8, group=64), "int4": Form(bits=4, group=32)}


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] float32 -> p [T, K] float32, whole numbers, and t [T]; t of a row that is not finite is not a number."""
    largest = x.abs().amax(1).clamp_min(LEAST)
    factor = torch.full_like(largest, TOP) / largest  # a number over a tensor would be its reciprocal times the number
    codes = (x * factor[:, None]).round_()
    return codes.nan_to_num(0.0), torch.where(largest.isfinite(), largest * (1 / TOP), torch.nan)


class _QuantizedLinear:
    """See `Ops.quantize_linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, form: Form) -> None:
        self._form = form
        self._codes, self._scales = form.quantize(weight)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor, activation: Activation = "none") -> Tensor:
        codes, row_scales = quantize_activations(x.float())
        total = x.new_zeros((len(x), len(self._codes)), dtype=torch.float32)
        group = self._form.group
        for g, (p, q) in enumerate(zip(codes.split(group, 1), self._codes.split(group, 1), strict=True)):
            scales = self._scales[:, g].float()
            part = (p.double() @ q.T.double()).float() * scales[:, 0]  # the sums are exact
            total += part if self._form.bits == 8 else part + p.sum(1, keepdim=True) * scales[:, 1]
        y = total * row_scales[:, None]
        return ACTIVATIONS[activation](y if self._bias is None else y + self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._form.dequantize(self._codes[ids], self._scales[ids])

    def holds(self, weight: Tensor) -> bool:
        return all(map(torch.equal, self._form.quantize(weight), (self._codes, self._scales)))


def quantize_linear(weight: Tensor, bias: Tensor | None, form: str) -> QuantizedLinear:
    """The op of the same name in `ops.py`."""
    return _QuantizedLinear(weight, bias, FORMS[form])
