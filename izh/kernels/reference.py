"""The op table in plain PyTorch: the definition of every op.

Owns: `REFERENCE`, right on any device and any float dtype, with statistics and attention in float32. Clear before fast.
Must not know: who calls it. Nothing here works in place except `write_kv`, whose purpose it is.
Names and shapes as in `ops.py`.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from izh.kernels.draw import draw
from izh.kernels.first_max import first_max
from izh.kernels.lora import add_lora
from izh.kernels.ops import Activation, FrozenLinear, Ops
from izh.kernels.quantized import ACTIVATIONS, quantize_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    return torch.cat(((x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype), x[..., 2 * half :]), -1)


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    rows = (slots >= 0).nonzero().flatten()
    size = k_pages.shape[2]
    block, offset = slots[rows] // size, slots[rows] % size
    k_pages[block, :, offset] = k[rows].to(k_pages.dtype)
    v_pages[block, :, offset] = v[rows].to(v_pages.dtype)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lens = query_starts.tolist(), context_lens.tolist()
    for s, length in enumerate(lens):
        rows = slice(starts[s], starts[s + 1])
        keys, values = (_gather(pages, block_table[s], length) for pages in (k_pages, v_pages))
        out[rows] = _attend(q[rows].float(), keys, values, scale, window).to(q.dtype)
    return out


def _gather(pages: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` keys of a sequence, [G, length, D] float32."""
    _, heads, size, width = pages.shape
    used = blocks[: -(-length // size)].long()
    return pages[used].transpose(0, 1).reshape(heads, -1, width)[:, :length].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """q [R, H, D] are the last R positions of keys, values [G, N, D] -> [R, H, D]."""
    rows, length = q.shape[0], keys.shape[1]
    position = torch.arange(length - rows, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    ratio = q.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(ratio, 0), values.repeat_interleave(ratio, 0)
    scores = (scale * (q.transpose(0, 1) @ keys.transpose(1, 2))).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def freeze_linear(weight: Tensor, bias: Tensor | None) -> FrozenLinear:
    def apply(x: Tensor, activation: Activation = "none") -> Tensor:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))

    return apply


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int | None) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    bounds = starts.tolist()
    for start, stop in pairwise(bounds):
        queries, keys, values = (x[start:stop].float().transpose(0, 1) for x in (q, k, v))
        scores = scale * (queries @ keys.transpose(1, 2))
        if window is not None:
            position = torch.arange(stop - start, device=q.device)
            scores = scores.masked_fill((position[:, None] - position).abs() > window, float("-inf"))
        out[start:stop] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out


REFERENCE = Ops(
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    write_kv=write_kv,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    add_lora=add_lora,
    freeze_linear=freeze_linear,
    quantize_linear=quantize_linear,
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
    packed_attention=packed_attention,
    first_max=first_max,
    draw=draw,
)
