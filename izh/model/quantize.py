"""A decoder whose weights are held in 8 or 4 bits.

Owns: LowBitLinear and LowBitEmbedding, which stand where Linear and Embedding stood; `Quantizer`, which puts them
there.
Must not know: checkpoints, families, the arithmetic (`izh/kernels/quantized.py`).
Invariant: a weight is in memory as floats or in few bits, never both; once for an embedding that the head shares.
"""

import logging

import torch
from torch import Tensor, nn

from izh.kernels.decoder import Projection
from izh.kernels.ops import QuantizedLinear
from izh.model.decoder import Decoder, Embedding
from izh.model.layers import Linear
from izh.model.module import Module

log = logging.getLogger("izh.model")

_ENDS = "int8"
"""How the embedding and the head are held."""


class LowBitLinear(Module):
    """A Linear with its weight in 8 or 4 bits; the bias stays as it is."""

    def __init__(self, weight: QuantizedLinear, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.quantized = weight
        self.in_features = in_features
        self.out_features = out_features
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self.quantized(x)

    @property
    def given(self) -> Projection:
        """As `Linear.given`."""
        return self.quantized


class LowBitEmbedding(Module):
    """An Embedding with its table in few bits."""

    def __init__(self, weight: QuantizedLinear, num_tokens: int, size: int) -> None:
        super().__init__()
        self.quantized = weight
        self.num_tokens = num_tokens
        self.size = size

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.quantized.rows(token_ids)


class Quantizer:
    """Turns a decoder's projections, head and embedding into few bits while its parameters are being written.

    "int8" and "int4" are the form of the layers' projections. Embedding and head always have 8 bits: 4 cost most there.

    `take` is told of each parameter once it is whole: projections are exchanged right then, so that only few are ever
    in memory as floats. The embedding, with which a head in the checkpoint may have to be compared, waits for `finish`.
    """

    def __init__(self, decoder: Decoder, form: str) -> None:
        self._decoder = decoder
        self._form = form
        self._missing = {
            path: {name for name, _ in module.named_parameters()}
            for path, module in decoder.named_modules()
            if isinstance(module, Linear) and module.weight is not decoder.embed_tokens.weight
        }
        self._float_bytes = self._num_bytes = 0

    def take(self, parameter: str) -> None:
        """A parameter is whole."""
        path, _, name = parameter.rpartition(".")
        missing = self._missing.get(path)
        if missing is not None:
            missing.discard(name)
            if not missing:
                del self._missing[path]
                form = _ENDS if path == "lm_head" else self._form
                self._put(path, self._linear(self._decoder.get_submodule(path), form))

    def finish(self) -> None:
        """All parameters are whole."""
        assert not self._missing
        embedding, head = self._decoder.embed_tokens, self._decoder.lm_head
        assert isinstance(embedding, Embedding)
        weight, ops = embedding.weight, self._decoder.norm.ops
        quantized = self._counted(ops.quantize_linear(weight.detach(), None, _ENDS), weight)
        num_tokens, size = weight.shape
        if isinstance(head, Linear):  # it shares the table
            self._put("lm_head", LowBitLinear(quantized, size, num_tokens, None))
        self._put("embed_tokens", LowBitEmbedding(quantized, num_tokens, size))
        sizes = self._num_bytes / 2**20, self._float_bytes / 2**20
        log.info("weights: %s, %.0f MiB instead of %.0f", self._form, *sizes)

    def _linear(self, linear: nn.Module, form: str) -> LowBitLinear:
        assert isinstance(linear, Linear)
        bias = None if linear.bias is None else linear.bias.detach()
        quantized = linear.ops.quantize_linear(linear.weight.detach(), bias, form)
        return LowBitLinear(self._counted(quantized, linear.weight), linear.in_features, linear.out_features, bias)

    def _counted(self, quantized: QuantizedLinear, weight: Tensor) -> QuantizedLinear:
        self._float_bytes += weight.nbytes
        self._num_bytes += quantized.num_bytes
        return quantized

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self._decoder.get_submodule(parent), name, module)


def dequantized(module: LowBitLinear | LowBitEmbedding, start: int, stop: int) -> Tensor:
    """Rows start .. stop-1 of the weight that the module computes with, float32."""
    return module.quantized.rows(torch.arange(start, stop))
