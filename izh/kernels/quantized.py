"""Linear layers with weights of 8 or 4 bits: the arithmetic, in plain PyTorch.

Owns: how weights and activations become integers (`FORMS`), `quantize_linear` (the op of that name, by definition).
Must not know: models, how the CPU's kernel lays weights out; it gives these numbers to the last bit.
Invariant: a row's result depends on that row and the weights alone, and is the same on every machine: sums within a
group are of integers, none can overflow, and groups are added in order.

    weight    w[n, k] = s[n, g] q[n, k] + m[n, g]     g = k / 32; s and m in float16
    int8      q in -127 .. 127, s = max over k in g of |w[n, k]| / 127, no m
    int8x2    the same; y is that of x, and + that of what the p of x leave of it, x[k] - t[g] p[k]
    int4      q in 0 .. 15, m = min over k in g of w[n, k], s = (max - m) / 15
    row       x[k] = t[g] p[k]                        t[g] = max over k in g of |x[k]| / 127, in float32
    result    y[n] = sum over g of t[g] (s[n, g] (sum over k in g of p[k] q[n, k])
                                         + m[n, g] (sum over k in g of p[k])) + bias[n]

These are the forms of GGUF's Q8_0 and Q4_1: a weight that comes from there is held as it is, to the bit. Activations
have 8 bits too, as bytes are what processors multiply fastest, and a scale for each 32, as a model's few large ones
make one for a row too coarse. What the perplexity of SmolLM2-135M-Instruct on the text of `izh bench perplexity`
grows by, with weights in 8 bits, when a scale of activations is for
    a whole row  6 %        64 neighbours  0.6 %        32 neighbours  0.2 %        (16 bits: -0.1 %)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from izh.kernels.ops import Activation, QuantizedLinear

GROUP = 32
"""Neighbours in a row, of a weight or of activations, that share a scale."""
TOP = 127
"""The largest magnitude of a whole number of 8 bits."""
LEAST = 1e-30
"""What the largest of some magnitudes is taken to be at least, so that zeros need no case of their own."""
_TOP_4 = 15

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Form:
    """How weights are held, and in how many digits of 8 bits what is multiplied with them is rounded: the second digit
    rounds what the first leaves."""

    bits: Literal[8, 4]
    digits: Literal[1, 2] = 1

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> q [N, K] int8; and float16, of each group: s [N, G, 1], or s and m [N, G, 2].

        Raises: ValueError where float16 holds no s or m.
        """
        weight = weight.detach().float()
        width = weight.shape[1]
        filled = torch.cat([weight, weight[:, -1:].expand(-1, -width % GROUP)], 1)  # the last group's range stays
        groups = filled.unflatten(1, (-1, GROUP))
        if self.bits == 8:
            scales = (groups.abs().amax(2, keepdim=True) * (1 / TOP)).half()
        else:
            least, largest = groups.amin(2), groups.amax(2)
            scales = torch.stack([(largest - least) * (1 / _TOP_4), least], 2).half()
        if not scales.isfinite().all():
            holds, other = ("int8 holds, 8.319e+06", "float32") if self.bits == 8 else ("int4 holds, 65504", "int8")
            raise ValueError(f"weight: {weight.abs().max():g} is beyond what {holds}; take {other}")
        s, *m = scales.float().split(1, 2)
        codes = ((groups - m[0] if m else groups) / s.masked_fill(s == 0, 1)).round_()
        codes = codes.clamp_(0, _TOP_4) if m else codes.clamp_(-TOP, TOP)
        return codes.to(torch.int8).flatten(1)[:, :width].contiguous(), scales

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """q [n, K], s or s and m [n, G, 1 or 2] -> w [n, K] float32."""
        of_each = scales.float().repeat_interleave(GROUP, 1)[:, : codes.shape[1]]
        weight = codes * of_each[..., 0]
        return weight if self.bits == 8 else weight + of_each[..., 1]


FORMS = {"int8": Form(bits=8), "int4": Form(bits=4), "int8x2": Form(bits=8, digits=2)}


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] float32 -> p [T, G, 32] float32, whole numbers, filled up with zeros, and t [T, G]; t of a group that is
    not finite is not a number."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2).clamp_min(LEAST)
    factor = torch.full_like(largest, TOP) / largest  # a number over a tensor would be its reciprocal times the number
    codes = (groups * factor[..., None]).round_()
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
        x = x.float()
        codes, row_scales = quantize_activations(x)
        y = self._product(codes, row_scales)
        y = y if self._bias is None else y + self._bias
        if self._form.digits == 2:
            rounded = (codes * row_scales[..., None]).flatten(1)[:, : x.shape[1]]
            y = self._product(*quantize_activations(x - rounded)) + y
        return ACTIVATIONS[activation](y)

    def _product(self, codes: Tensor, row_scales: Tensor) -> Tensor:
        y = codes.new_zeros((len(codes), len(self._codes)))
        for g, q in enumerate(self._codes.split(GROUP, 1)):
            scales, p = self._scales[:, g].float(), codes[:, g]
            part = (p[:, : q.shape[1]] @ q.float().T) * scales[:, 0]  # the sums are exact
            if self._form.bits == 4:
                part += p.sum(1, keepdim=True) * scales[:, 1]
            y += part * row_scales[:, g, None]
        return y

    def rows(self, ids: Tensor) -> Tensor:
        return self._form.dequantize(self._codes[ids], self._scales[ids])

    def holds(self, weight: Tensor) -> bool:
        return all(map(torch.equal, self._form.quantize(weight), (self._codes, self._scales)))


def quantize_linear(weight: Tensor, bias: Tensor | None, form: str) -> QuantizedLinear:
    """The op of the same name in `ops.py`."""
    return _QuantizedLinear(weight, bias, FORMS[form])
