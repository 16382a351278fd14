"""The parts of a decoder layer.

Owns: Linear, RMSNorm, Attention, MLP and DecoderLayer, all inference only; the numerics are `Ops`.
Must not know: families, checkpoints, features. A feature may replace a projection by a module with the same call.
Invariant: a layer reads the batch and writes its own KV pages, nothing else.

T = rows in the step, D = hidden size.
"""

import torch
from torch import Tensor, nn

from izh.batch import Batch
from izh.kernels.both_ways import attend_both_ways
from izh.kernels.decoder import CosSin, LayerWeights, Pages, Projection
from izh.kernels.ops import FrozenLinear, Ops
from izh.model.module import Module
from izh.model.spec import LayerSpec, ModelSpec


class Linear(Module, nn.Linear):
    """nn.Linear on `Ops`, whose parameters start out unset: loading writes all of them."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ops = ops
        self._packed: FrozenLinear | None = None

    def pack(self) -> None:
        """Keep a second copy of the weight, in the order in which many rows are multiplied fastest."""
        self._packed = self.ops.freeze_linear(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        if self._packed is not None and len(x) > self.ops.few_rows:
            return self._packed(x)
        return self.ops.linear(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        pass

    @property
    def given(self) -> Projection:
        """What a kernel computes with."""
        return self.weight, self.bias


class RMSNorm(Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [T, D] -> (norm of the sum, the sum). May write the sum into `residual`."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(Module):
    """Grouped-query attention over paged KV, with one fused projection for queries, keys and values."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.ops = ops
        self.window = layer.window
        self.head_dim = spec.head_dim
        self.num_heads = [size // spec.head_dim for size in spec.qkv_sizes]
        self.scale = spec.attention_scale
        self.qkv_proj = Linear(spec.hidden_size, sum(spec.qkv_sizes), spec.qkv_bias, ops, device, dtype)
        self.o_proj = Linear(spec.qkv_sizes[0], spec.hidden_size, spec.o_bias, ops, device, dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, ops, device, dtype)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, ops, device, dtype)

    def forward(self, x: Tensor, batch: Batch, cos_sin: CosSin | None, pages: Pages) -> Tensor:
        """x [T, D] -> [T, D]; writes the rows' keys and values into `pages`."""
        q, k, v = self.qkv_proj(x).view(len(x), -1, self.head_dim).split(self.num_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = self.ops.rope(q, k, *cos_sin)
        self.ops.write_kv(k, v, *pages, batch.write_slots)
        out = self.ops.paged_attention(
            q,
            *pages,
            batch.query_starts,
            batch.context_lens,
            batch.block_table,
            self.scale,
            self.window,
        )
        for span in batch.both_ways:
            rows, blocks = slice(span.start, span.stop), batch.block_table[span.sequence]
            out[rows] = attend_both_ways(q[rows], *pages, blocks, span.context_len, self.scale, self.window)
        return self.o_proj(out.flatten(1))


class MLP(Module):
    """Gated MLP with gate and up in one projection."""

    def __init__(self, spec: ModelSpec, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        width, bias = spec.intermediate_size, spec.mlp_bias
        self.activation = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_tanh_mul}[spec.activation]
        self.gate_up_proj = Linear(spec.hidden_size, 2 * width, bias, ops, device, dtype)
        self.down_proj = Linear(width, spec.hidden_size, bias, ops, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class DecoderLayer(Module):
    """Attention and MLP around a running residual.

    x is what the previous layer still has to add to the residual (None before the first layer), so that each addition
    is fused with the norm after it:

        residual += x;  x = attention(input_norm(residual))     [then post_attention_norm, if sandwich_norms]
        residual += x;  x = mlp(mlp_norm(residual))              [then post_mlp_norm, if sandwich_norms]
    """

    def __init__(self, spec: ModelSpec, layer: LayerSpec, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.rope = layer.rope
        self.attention = Attention(spec, layer, ops, device, dtype)
        self.mlp = MLP(spec, ops, device, dtype)
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, ops, device, dtype)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, ops, device, dtype)
        self.post_attention_norm: RMSNorm | None = None
        self.post_mlp_norm: RMSNorm | None = None
        if spec.sandwich_norms:
            self.post_attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, ops, device, dtype)
            self.post_mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, ops, device, dtype)

    def forward(
        self, x: Tensor | None, residual: Tensor, batch: Batch, rotary: list[CosSin], pages: Pages
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, D] -> (what is still to be added, residual). `rotary` has cos and sin of each recipe."""
        if x is None:
            x = self.input_norm(residual)
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, batch, None if self.rope is None else rotary[self.rope], pages)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(x)
        return x, residual

    def given(self) -> LayerWeights:
        """What the layer computes with, and how."""
        attention, mlp = self.attention, self.mlp

        def weight(norm: RMSNorm | None) -> Tensor | None:
            return None if norm is None else norm.weight

        return LayerWeights(
            input_norm=self.input_norm.weight,
            qkv=attention.qkv_proj.given,
            q_norm=weight(attention.q_norm),
            k_norm=weight(attention.k_norm),
            o=attention.o_proj.given,
            post_attention_norm=weight(self.post_attention_norm),
            mlp_norm=self.mlp_norm.weight,
            gate_up=mlp.gate_up_proj.given,
            down=mlp.down_proj.given,
            post_mlp_norm=weight(self.post_mlp_norm),
            rope=self.rope,
            window=attention.window,
        )
