"""The bidirectional encoder: one forward pass over sequences laid end to end, no padding anywhere.

Owns: Encoder, its two kinds of layer, and the embedding of tokens.
Must not know: files, tokenizers, pooling, who asks.
Invariant: a row of the output depends on the rows of its own sequence only, bit for bit where the ops promise so.

T = rows, S = sequences, D = hidden size, H = heads.

all-MiniLM-L6-v2, tokenizing and pooling included, tokens/s here / in sentence-transformers 6.2 (batches of 32), medians
of 5 in turn on 2 cores of a Zen 5, then with oneDNN and torch held to AVX2:
256 sentences of 6 to 16 words     17520 / 6298    9452 / 6307
256 texts of 5 to 200 words        14923 / 5331    8925 / 5516
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from izh.kernels.ops import FrozenLinear, Ops
from izh.model.encoders.spec import EncoderLayerSpec, EncoderSpec
from izh.model.encoders.tensors import EncoderTensors


class Norm:
    """Layer norm with its weights; the bias may be absent."""

    def __init__(self, tensors: EncoderTensors, name: str, spec: EncoderSpec, ops: Ops) -> None:
        self.weight = tensors.take(f"{name}.weight", spec.hidden_size)
        self.bias = tensors.take(f"{name}.bias", spec.hidden_size) if spec.has_norm_bias else None
        self.eps = spec.norm_eps
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum); may write the sum into `residual`."""
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


def take_linear(
    tensors: EncoderTensors, names: list[str], outputs: int, inputs: int, has_bias: bool, ops: Ops
) -> FrozenLinear:
    """Linear layers of the same input as one, `outputs` columns each, in this order."""
    weights = [tensors.take(f"{name}.weight", outputs, inputs) for name in names]
    biases = [tensors.take(f"{name}.bias", outputs) for name in names] if has_bias else []
    return ops.freeze_linear(torch.cat(weights), torch.cat(biases) if biases else None)


class Attention:
    """Every row of a sequence sees the whole sequence, or a window around itself."""

    def __init__(self, spec: EncoderSpec, layer: EncoderLayerSpec, qkv: FrozenLinear, out: FrozenLinear, ops: Ops):
        self.qkv, self.out, self.ops = qkv, out, ops
        self.heads, self.head_dim, self.window = spec.num_heads, spec.head_dim, layer.window

    def __call__(self, x: Tensor, starts: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, self.head_dim)).unbind(1)
        if cos_sin is not None:
            q, k = self.ops.rope(q, k, *cos_sin)
        attended = self.ops.packed_attention(q, k, v, starts, self.head_dim**-0.5, self.window)
        return self.out(attended.flatten(1))


class PostNormLayer:
    """BERT's: a norm after each addition."""

    def __init__(self, tensors: EncoderTensors, name: str, spec: EncoderSpec, layer: EncoderLayerSpec, ops: Ops):
        size, wide, bias = spec.hidden_size, spec.intermediate_size, spec.has_attention_bias
        own = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        qkv = take_linear(tensors, own, size, size, bias, ops)
        out = take_linear(tensors, [f"{name}.attention.output.dense"], size, size, bias, ops)
        self.attention = Attention(spec, layer, qkv, out, ops)
        self.attention_norm = Norm(tensors, f"{name}.attention.output.LayerNorm", spec, ops)
        self.up = take_linear(tensors, [f"{name}.intermediate.dense"], wide, size, spec.has_mlp_bias, ops)
        self.down = take_linear(tensors, [f"{name}.output.dense"], size, wide, spec.has_mlp_bias, ops)
        self.norm = Norm(tensors, f"{name}.output.LayerNorm", spec, ops)
        self.activation = spec.activation

    def __call__(self, x: Tensor, starts: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> Tensor:
        x, _ = self.attention_norm.add(self.attention(x, starts, cos_sin), x)
        return self.norm.add(self.down(self.up(x, self.activation)), x)[0]


class PreNormLayer:
    """ModernBERT's: a norm before attention (none in the first layer) and before the gated MLP."""

    def __init__(
        self,
        tensors: EncoderTensors,
        name: str,
        spec: EncoderSpec,
        layer: EncoderLayerSpec,
        ops: Ops,
        is_first: bool,
    ):
        size, wide, bias = spec.hidden_size, spec.intermediate_size, spec.has_attention_bias
        qkv = take_linear(tensors, [f"{name}.attn.Wqkv"], 3 * size, size, bias, ops)
        out = take_linear(tensors, [f"{name}.attn.Wo"], size, size, bias, ops)
        self.attention = Attention(spec, layer, qkv, out, ops)
        self.attention_norm = None if is_first else Norm(tensors, f"{name}.attn_norm", spec, ops)
        self.mlp_norm = Norm(tensors, f"{name}.mlp_norm", spec, ops)
        both = tensors.take(f"{name}.mlp.Wi.weight", 2 * wide, size)
        up_bias = gate_bias = None
        if spec.has_mlp_bias:
            up_bias, gate_bias = tensors.take(f"{name}.mlp.Wi.bias", 2 * wide).chunk(2)
        self.up, self.gate = ops.freeze_linear(both[:wide], up_bias), ops.freeze_linear(both[wide:], gate_bias)
        self.down = take_linear(tensors, [f"{name}.mlp.Wo"], size, wide, spec.has_mlp_bias, ops)
        self.activation = spec.activation

    def __call__(self, x: Tensor, starts: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        normed, x = self.mlp_norm.add(self.attention(normed, starts, cos_sin), x)
        return x + self.down(self.up(normed, self.activation).mul_(self.gate(normed)))


class Encoder:
    """A transformer encoder for inference, its weights in the order that suits the machine."""

    def __init__(self, spec: EncoderSpec, tensors: EncoderTensors, ops: Ops) -> None:
        """Takes the encoder's tensors out of `tensors`. Raises ModelLoadError naming the tensor at fault."""
        self.spec = spec
        size = spec.hidden_size
        self.positions: Tensor | None = None
        self.types: Tensor | None = None
        self.final_norm: Norm | None = None
        self.layers: list[PostNormLayer | PreNormLayer] = []
        if spec.is_pre_norm:
            self.tokens = tensors.take("embeddings.tok_embeddings.weight", spec.vocab_size, size)
            self.embedding_norm = Norm(tensors, "embeddings.norm", spec, ops)
            for i, layer in enumerate(spec.layers):
                self.layers.append(PreNormLayer(tensors, f"layers.{i}", spec, layer, ops, i == 0))
            self.final_norm = Norm(tensors, "final_norm", spec, ops)
        else:
            self.tokens = tensors.take("embeddings.word_embeddings.weight", spec.vocab_size, size)
            count = spec.max_length + (0 if spec.padding_id is None else spec.padding_id + 1)
            self.positions = tensors.take("embeddings.position_embeddings.weight", count, size)
            self.types = tensors.take("embeddings.token_type_embeddings.weight", spec.num_types, size)
            self.embedding_norm = Norm(tensors, "embeddings.LayerNorm", spec, ops)
            for i, layer in enumerate(spec.layers):
                self.layers.append(PostNormLayer(tensors, f"encoder.layer.{i}", spec, layer, ops))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, starts: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """token_ids [T] int64, starts [S+1] int32, type_ids [T] int64 (None: all 0) -> the last layer's rows [T, D].

        No sequence is longer than `spec.max_length`.
        """
        first = starts.long()
        own_first = first[:-1].repeat_interleave(first.diff())
        index = torch.arange(len(token_ids)) - own_first
        x = self._embed(token_ids, index, own_first, type_ids)
        rotary = {layer.rope_theta: self._cos_sin(index, layer.rope_theta) for layer in self.spec.layers}
        for spec, layer in zip(self.spec.layers, self.layers, strict=True):
            x = layer(x, starts, rotary[spec.rope_theta])
        return x if self.final_norm is None else self.final_norm(x)

    def _embed(self, token_ids: Tensor, index: Tensor, own_first: Tensor, type_ids: Tensor | None) -> Tensor:
        rows = F.embedding(token_ids, self.tokens)
        if self.positions is None or self.types is None:
            return self.embedding_norm(rows)
        rows += self.types[0] if type_ids is None or self.spec.num_types == 1 else F.embedding(type_ids, self.types)
        if self.spec.padding_id is not None:
            # As transformers does, also where the padding id stands inside a text.
            is_token = token_ids != self.spec.padding_id
            before = F.pad(is_token.cumsum(0), (1, 0))
            index = torch.where(is_token, before[1:] - before[own_first], 0) + self.spec.padding_id
        return self.embedding_norm.add(F.embedding(index, self.positions), rows)[0]

    def _cos_sin(self, index: Tensor, theta: float | None) -> tuple[Tensor, Tensor] | None:
        if theta is None:
            return None
        size = self.spec.head_dim
        angles = index[:, None].float() * (1.0 / theta ** (torch.arange(0, size, 2).float() / size))
        return angles.cos(), angles.sin()
