"""The table of ops a decoder is made of: each one's meaning and shapes.

Owns: `Ops`, the set of callables that `select.py` fills for a device; the semantics written here are the definition,
and `reference.py` is that definition in plain PyTorch.
Must not know: models, sequences, devices.

T = rows in the step, S = sequences, H = query heads, G = KV heads, D = head width, B = block size.
KV pages of one layer: k_pages and v_pages, [num_blocks, G, B, D]; slot s lies at [s // B, :, s % B].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from izh.kernels.decoder import DecoderLayers, DecoderSizes, LayerWeights
from izh.kernels.draw import Filters
from izh.kernels.lora import AdapterRows

Activation = Literal["none", "gelu", "gelu_tanh", "relu"]


class FrozenLinear(Protocol):
    """A linear layer that keeps its weight in whatever order suits the device."""

    def __call__(self, x: Tensor, activation: Activation = "none") -> Tensor:
        """x [T, K] -> [T, N] = activation(x weight^T + bias)."""
        ...


class QuantizedLinear(Protocol):
    """A linear layer that keeps its weight in 8 or 4 bits a value, and no other copy of it."""

    @property
    def num_bytes(self) -> int:
        """What the weight takes, its scales included."""
        ...

    def __call__(self, x: Tensor, activation: Activation = "none") -> Tensor:
        """x [T, K] float32 -> [T, N] = activation(x weight^T + bias), as `izh/kernels/quantized.py` defines it."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """ids [n] int64 -> [n, K] float32: rows of the weight as this layer computes with them."""
        ...

    def holds(self, weight: Tensor) -> bool:
        """True when it would be just the same, made of this weight [N, K]."""
        ...


class LoraLinear(Protocol):
    """A linear layer with a bank of low-rank corrections beside it. It reads them where they lie, so what is written
    into them counts; it keeps them alive."""

    def __call__(self, x: Tensor, rows: AdapterRows) -> Tensor:
        """x [T, K] -> [T, D]: `Ops.linear`, then `Ops.add_lora` on it, to the bit."""
        ...


@dataclass(frozen=True)
class Ops:
    """One implementation of every op. Inputs are contiguous in their last dimension; rows may be strided views."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """linear(x [T, K], weight [N, K], bias [N] or None) -> [T, N] = x weight^T + bias."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """rms_norm(x [..., N], weight [N], eps) -> [..., N].  y = x / sqrt(mean(x^2) + eps) * weight, statistics in
    float32.  (A family whose weight is stored as w - 1 adds the 1 at load.)"""

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """add_rms_norm(x [T, N], residual [T, N], weight [N], eps) -> (rms_norm(s), s) with s = x + residual.
    May write s into `residual` and return that."""

    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """rope(q [T, H, D], k [T, G, D], cos [T, R/2], sin [T, R/2]) -> (q, k) rotated, R <= D the rotary width, split-half
    layout: with x1 = x[..., :R/2], x2 = x[..., R/2:R], (x1 cos - x2 sin, x2 cos + x1 sin, rest unchanged).  May work in
    place; q and k may be views into one fused projection."""

    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """write_kv(k [T, G, D], v [T, G, D], k_pages, v_pages, slots [T] int64): k_pages[slots[t]] = k[t], same for v; slot
    -1 writes nothing.  Modifies the pages."""

    paged_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
    """paged_attention(q [T, H, D], k_pages, v_pages, query_starts [S+1] int32, context_lens [S] int32, block_table
    [S, M] int32, scale, window) -> [T, H, D].  Row t of sequence s is at position
    p = context_lens[s] - (query_starts[s+1] - t) and sees keys j with j <= p and, when window is not None,
    j > p - window; key j lies in block block_table[s, j // B].  Query head h reads KV head h // (H / G).
    softmax(scale * q k^T) v in float32."""

    silu_mul: Callable[[Tensor], Tensor]
    """silu_mul(x [T, 2N]) -> [T, N] = silu(x[:, :N]) * x[:, N:]."""

    gelu_tanh_mul: Callable[[Tensor], Tensor]
    """gelu_tanh_mul(x [T, 2N]) -> [T, N] = gelu_tanh(x[:, :N]) * x[:, N:]."""

    add_lora: Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Tensor, AdapterRows], None]
    """add_lora(y [T, D], x [T, K], a [S, P, R, K], b [S, D, R], offsets (P + 1 numbers, 0 .. D), ranks [S, P] int32 on
    the host, rows).  For each row t of `rows` with slot s, and each part p with r = ranks[s, p] and outputs
    d in offsets[p] .. offsets[p+1]-1:  y[t, d] += b[s, d, :r] @ (a[s, p, :r] @ x[t]).  Modifies y."""

    freeze_linear: Callable[[Tensor, Tensor | None], FrozenLinear]
    """freeze_linear(weight [N, K], bias [N] or None) -> a layer for weights that never change (an encoder's). It may
    hold a copy in another order, so the caller lets go of the weight. "gelu" is the exact one (erf)."""

    quantize_linear: Callable[[Tensor, Tensor | None, str], QuantizedLinear]
    """quantize_linear(weight [N, K], bias [N] or None, form "int8", "int8x2" or "int4") -> a layer with the weight in 8
    or 4 bits, of which the caller lets go; the bias is kept as it is. float32 on the CPU."""

    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    """layer_norm(x [T, N], weight [N], bias [N] or None, eps) -> [T, N] = (x - mean) / sqrt(variance + eps) * weight
    + bias, statistics of the row in float32."""

    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    """add_layer_norm(x [T, N], residual [T, N], weight, bias, eps) -> (layer_norm(s), s) with s = x + residual.
    May write s into `residual` and return that."""

    packed_attention: Callable[[Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
    """packed_attention(q, k, v [T, H, D], starts [S+1] int32, scale, window) -> [T, H, D]. Sequences lie end to end:
    rows starts[s] .. starts[s+1]-1 see all keys of the same rows, or with a window those at most `window` away on
    either side.  softmax(scale * q k^T) v in float32.  The three may be views into one fused projection."""

    first_max: Callable[[Tensor], tuple[Tensor, Tensor]]
    """first_max(x [R, V]) -> (values [R], columns [R] int64): each row's maximum and the lowest column that has it. NaN
    is above every number.  float32."""

    draw: Callable[[Tensor, Tensor, Filters, Tensor], Tensor]
    """draw(logits [R, V], peak [R], filters, uniform [R] float64 in [0, 1)) -> [R] int64: a token of each row, as
    `izh/kernels/draw.py` defines it.  peak is the row's largest logit; a row of which that is not finite gets any
    column.  float32."""

    linear_lora: Callable[[Tensor, Tensor | None, Tensor, Tensor, tuple[int, ...], Tensor], LoraLinear] | None = None
    """linear_lora(weight, bias, a, b, offsets, ranks), with the arguments of `linear` and `add_lora`: a layer that does
    both at once, where that is faster; else None."""

    join_layers: Callable[[Sequence[LayerWeights], DecoderSizes], DecoderLayers] | None = None
    """join_layers(layers, sizes) -> all of them in one call, to the bit what the ops above give one after another; else
    None. Of floats, for steps of at most `few_rows` rows. float32."""

    lora_b_by_rank: bool = False
    """How b lies in memory for `add_lora` and `linear_lora` (see `lora_room`)."""

    lora_half: bool = False
    """Whether a and b of `add_lora` and `linear_lora` may both be float16, whatever x is: the numbers are the same."""

    few_rows: int = 0
    """Up to how many rows `linear` is to be asked, with the weight as it lies, and beyond which a frozen layer."""
