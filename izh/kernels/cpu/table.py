"""The CPU's op tables, and the compiling of their kernels ahead of the first request.

Owns: `NUMBA`, `DETERMINISTIC`, `with_rows`, `warm_up`. Must not know: models, the progress bar that watches.
Invariant: each kernel has one signature (`compile.py`), so one small call compiles all that any model needs.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from izh.kernels.cpu import (
    attention,
    draw,
    elementwise,
    first_max,
    frozen,
    join,
    layer_norm,
    linear,
    linear_quantized,
    lora,
    packed_attention,
)
from izh.kernels.cpu.row_limits import ANY_ROWS, RowLimits
from izh.kernels.cpu.simd import HAS_HALF
from izh.kernels.decoder import DecoderSizes, LayerWeights, Projection
from izh.kernels.draw import Filters
from izh.kernels.lora import AdapterRows, lora_room
from izh.kernels.ops import Ops

NUMBA = Ops(
    linear=linear.linear_up_to(64),
    rms_norm=elementwise.rms_norm,
    add_rms_norm=elementwise.add_rms_norm,
    rope=elementwise.rope,
    write_kv=elementwise.write_kv,
    paged_attention=attention.paged_attention,
    silu_mul=elementwise.silu_mul,
    gelu_tanh_mul=elementwise.gelu_tanh_mul,
    add_lora=lora.add_lora,
    freeze_linear=frozen.freeze_linear,
    quantize_linear=linear_quantized.quantize_linear,
    layer_norm=layer_norm.layer_norm,
    add_layer_norm=layer_norm.add_layer_norm,
    packed_attention=packed_attention.packed_attention,
    first_max=first_max.first_max,
    draw=draw.draw,
    linear_lora=lora.LoraLinear,
    join_layers=join.join_layers,
    lora_b_by_rank=True,
    lora_half=HAS_HALF,
    few_rows=64,
)

DETERMINISTIC = replace(NUMBA, linear=linear.linear, few_rows=ANY_ROWS)
"""`NUMBA`, with each row computed in one order of arithmetic whatever else is in the step: to the last bit it depends
on that row and the weights (or pages) alone, not on how many rows there are, where among them it lies, how they are
grouped by adapter, or how many threads run. In `NUMBA` only products of many rows are the vendor's, which picks its
order by shape."""


def with_rows(limits: RowLimits) -> Ops:
    """`NUMBA`, with linear layers by the kernel for as many rows as `limits` says, by the vendor's for more."""
    return replace(NUMBA, linear=linear.linear_up_to(limits.plain), few_rows=min(limits.plain, limits.packed))


def warm_up(progress: Callable[[int, int], None] | None = None, *, quantized: bool = False) -> None:
    """Compile every kernel, those for weights of few bits only if `quantized`, or load it from the cache on disk, and
    start the threads.

    Calls `progress(done, total)` before the first kernel and after each. Cold, all take close to a minute.
    """
    row, heads, pages = torch.zeros(1, 8), torch.zeros(1, 1, 8), torch.zeros(1, 1, 4, 8)
    starts, one = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    rows, weight = AdapterRows.of([0]), torch.zeros(8, 8)
    number = torch.ones(1, dtype=torch.float64)
    filters = Filters(row[0, :1] + 1, row[0, :1], number.long(), number, is_on=False)
    b = lora_room(weight, 1, 1, NUMBA.lora_b_by_rank)
    assert rows is not None

    def project(weight: Tensor) -> Projection:
        return NUMBA.quantize_linear(weight, None, "int8") if quantized else (weight, None)

    calls: list[Callable[[], object]] = [
        lambda: NUMBA.linear(row, row, None),
        lambda: NUMBA.rms_norm(row, row[0], 1e-5),
        lambda: NUMBA.rope(heads, heads, row[:, :4].contiguous(), row[:, :4].contiguous()),
        lambda: NUMBA.write_kv(heads, heads, pages, pages, torch.zeros(1, dtype=torch.int64)),
        lambda: NUMBA.silu_mul(row),
        lambda: NUMBA.paged_attention(
            heads, pages, pages, starts, one, torch.zeros(1, 1, dtype=torch.int32), 1.0, None
        ),
        lambda: NUMBA.draw(row, row[0, :1], filters, 0 * number),
        lambda: NUMBA.add_lora(row, row, row[None, None], b, (0, 8), one[None], rows),
        lambda: lora.LoraLinear(weight, None, row[None, None], b, (0, 8), one[None])(row, rows),
        lambda: _one_layer(row, pages, project),
    ]
    for done, call in enumerate([None, *calls]):
        if call is not None:
            call()
        if progress is not None:
            progress(done, len(calls))


def _one_layer(row: Tensor, pages: Tensor, projection: Callable[[Tensor], Projection]) -> None:
    """A decoder of one layer, one head and 8 numbers a row, on one row."""
    norm, weight = row[0], torch.zeros(8, 8)
    layer = LayerWeights(
        input_norm=norm,
        qkv=projection(torch.zeros(24, 8)),
        q_norm=None,
        k_norm=None,
        o=projection(weight),
        post_attention_norm=None,
        mlp_norm=norm,
        gate_up=projection(torch.zeros(16, 8)),
        down=projection(weight),
        post_mlp_norm=None,
        rope=None,
        window=None,
    )
    sizes = DecoderSizes(
        num_heads=1, num_kv_heads=1, head_dim=8, intermediate_size=8, eps=1e-5, scale=1.0, activation="silu"
    )
    starts, blocks = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    layers = join.join_layers([layer], sizes)
    layers(row.clone(), [], [(pages, pages)], starts, starts[1:], blocks, torch.zeros(1, dtype=torch.int64), None)
