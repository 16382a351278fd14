"""All layers of a decoder in one call, for steps of few rows.

Owns: the walk through the layers, and the room for what lies between their parts.
Must not know: the arithmetic. It calls the kernels that the ops are made of, in the order in which modules do.
Invariant: to the last bit what the ops give one after another.

At one row a step is some 300 kernels of a few microseconds, and what Python does around one takes as long again, the
more so as the weights that stream by leave nothing of the interpreter in the caches. So it is left once for all.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from izh.kernels.cpu import attention, linear, linear_quantized
from izh.kernels.cpu.compile import int64_at, kernel
from izh.kernels.cpu.elementwise import (
    PARALLEL_FLOATS,
    gate_kernel,
    norm_kernel,
    rope_kernel,
    write_kv_kernel,
)
from izh.kernels.cpu.lora_add import add_lora_rows
from izh.kernels.cpu.lora_linear import linear_lora_rows

# A layer's row of the table: addresses of norms (0 = none), which recipe of rotation (-1 = none), the window, and four
# projections as `linear_at` wants them.
INPUT_NORM, Q_NORM, K_NORM, POST_ATTENTION_NORM, MLP_NORM, POST_MLP_NORM, ROPE, WINDOW = range(8)
_ROOM = 12  # numbers of a projection, filled up
PROJECTIONS = 4
CORRECTED = 15  # beside it what `linear_lora_rows` takes of a layer, and last whether rows of the step are corrected
QKV, OUT, GATE_UP, DOWN = range(8, 8 + 4 * _ROOM, _ROOM)
FIELDS = DOWN + _ROOM
_NONE, _ONE = np.int64(0), np.int64(1)  # as a literal, each would be a signature of its own


class Sizes(NamedTuple):
    """Of the model."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    num_recipes: int
    is_tanh: int


class Step(NamedTuple):
    """What a step brings: numbers, and addresses."""

    rows: int
    num_sequences: int
    table_width: int
    query_starts: int
    context_lens: int
    block_table: int
    slots: int
    num_blocks: int
    block: int
    threads: int
    order: int  # from here on as `AdapterRows.host_memory`
    num_order: int
    starts: int
    adapters: int
    num_groups: int


def row_floats(sizes: Sizes) -> int:
    """Floats of a row of all that lies between the parts, in the order in which `layers_kernel` cuts it up."""
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return 2 * sizes.hidden + (q + 2 * kv) + (q + kv) + q + 3 * sizes.width


@kernel()
def _threads(floats: int, threads: int) -> int:
    return 1 if floats < PARALLEL_FLOATS else threads


@kernel()
def _project(is_quantized: Any, layer: Any, field: int, lora: Any, step: Any, x: int, width: int, out: int) -> int:
    """`is_quantized` None is no: of the two only the one that is meant is then compiled. -1, or a group of corrected
    rows that does not fit."""
    fixed, rows = layer[field : field + _ROOM], step.rows
    if is_quantized is None:
        if lora[CORRECTED] and rows <= linear.PANEL:
            return linear_lora_rows(
                x, rows, width, lora[0], lora[1], lora[2], lora[3], lora[4], lora[5] == 1, lora[6], lora[7], lora[8],
                lora[9], lora[10], lora[11], lora[12], lora[13], lora[14], step.order, step.num_order, step.starts,
                step.adapters, step.num_groups, step.threads, out, lora[12],
            )  # fmt: skip
        linear.linear_at(fixed, x, rows, width, out, step.threads)
        if lora[CORRECTED]:
            return add_lora_rows(
                x, rows, width, lora[0], lora[5] == 1, lora[6], lora[7], lora[8], lora[9], lora[10], lora[11], lora[12],
                lora[13], lora[14], step.order, step.num_order, step.starts, step.adapters, step.num_groups,
                step.threads, out, lora[12],
            )  # fmt: skip
    else:
        linear_quantized.linear_at(fixed, x, rows, width, out, step.threads)
    return -1


@kernel()
def _norm_rows(x: int, rows: int, width: int, residual: int, weight: int, eps: float, out: int, threads: int) -> None:
    """With a residual of address 0, the norm of x; else that of their sum, which is left there."""
    stride = width if residual else 0
    few = _threads(rows * width, threads)
    norm_kernel(x, rows, _ONE, width, _NONE, residual, stride, weight, width, eps, out, few)


@kernel()
def _attend(
    layer: Any, sizes: Any, step: Any, scale: float, eps: float, qkv: int, normed: int, rotary: Any, k_pages: int,
    v_pages: int, out: int,
) -> int:  # fmt: skip
    """Attention of the rows of `qkv`; `normed` is room for queries and keys. -1, or a fault (`layers_kernel`)."""
    rows, heads, kv_heads, width = step.rows, sizes.heads, sizes.kv_heads, sizes.head_dim
    row = (heads + 2 * kv_heads) * width
    q, q_row, k, k_row, v = qkv, row, qkv + 4 * heads * width, row, qkv + 4 * (heads + kv_heads) * width
    if layer[Q_NORM]:
        q, q_row, k, k_row = normed, heads * width, normed + 4 * rows * heads * width, kv_heads * width
        for source, number, to, weight in (
            (qkv, heads, q, layer[Q_NORM]), (qkv + 4 * heads * width, kv_heads, k, layer[K_NORM]),
        ):  # fmt: skip
            few = _threads(rows * number * width, step.threads)
            norm_kernel(source, rows * number, number, row, width, _NONE, _NONE, weight, width, eps, to, few)
    if layer[ROPE] >= 0:
        cos, sin, half = rotary[layer[ROPE]]
        few = _threads(rows * (heads + kv_heads) * width, step.threads)
        rope_kernel(q, heads, q_row, width, k, kv_heads, k_row, width, rows, width, cos, sin, half, few)
    bad = write_kv_kernel(
        k, k_row, width, v, row, width, rows, kv_heads, width, k_pages, v_pages, step.num_blocks * step.block,
        step.block, step.slots, _threads(2 * rows * kv_heads * width, step.threads),
    )  # fmt: skip
    if bad >= 0:
        return -2 - bad
    return attention.paged_attention_kernel(
        q, q_row, width, k_pages, v_pages, step.num_blocks * kv_heads * step.block * width, step.query_starts,
        step.context_lens, step.block_table, step.num_sequences, step.table_width, rows, kv_heads, heads // kv_heads,
        width, step.block, scale, layer[WINDOW], step.threads, out,
    )  # fmt: skip


@kernel()
def layers_kernel(
    is_quantized: Any, sizes: Any, step: Any, table: int, corrections: int, pages: int, rotary: int, eps: float,
    scale: float, residual: int, x: int, room: int,
) -> int:  # fmt: skip
    """Leaves in `x` what is still to be added to `residual`. Returns -1; or what attention's `find_fault` found; or
    -2 - r for a row r whose slot does not exist; or -2 - rows - g for a group g of corrected rows that does not fit."""
    rows, hidden, width, threads = step.rows, sizes.hidden, sizes.width, step.threads
    q_width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layers = carray(int64_at(table), (sizes.num_layers, FIELDS))
    all_corrections = carray(int64_at(corrections), (sizes.num_layers, PROJECTIONS, CORRECTED + 1))
    all_pages = carray(int64_at(pages), (sizes.num_layers, 2))
    recipes = carray(int64_at(rotary), (sizes.num_recipes, 3))
    normed = room
    made = normed + 4 * rows * hidden
    qkv = made + 4 * rows * hidden
    heads = qkv + 4 * rows * (q_width + 2 * kv_width)
    attended = heads + 4 * rows * (q_width + kv_width)
    gate_up = attended + 4 * rows * q_width
    gated = gate_up + 4 * rows * 2 * width
    for i in range(sizes.num_layers):
        layer, lora = layers[i], all_corrections[i]
        if i == 0:
            _norm_rows(residual, rows, hidden, _NONE, layer[INPUT_NORM], eps, normed, threads)
        else:
            _norm_rows(x, rows, hidden, residual, layer[INPUT_NORM], eps, normed, threads)
        bad = _project(is_quantized, layer, QKV, lora[0], step, normed, hidden, qkv)
        fault = _attend(layer, sizes, step, scale, eps, qkv, heads, recipes, all_pages[i, 0], all_pages[i, 1], attended)
        if fault != -1:
            return fault
        to = made if layer[POST_ATTENTION_NORM] else x
        bad = max(bad, _project(is_quantized, layer, OUT, lora[1], step, attended, q_width, to))
        if layer[POST_ATTENTION_NORM]:
            _norm_rows(made, rows, hidden, _NONE, layer[POST_ATTENTION_NORM], eps, x, threads)
        _norm_rows(x, rows, hidden, residual, layer[MLP_NORM], eps, normed, threads)
        bad = max(bad, _project(is_quantized, layer, GATE_UP, lora[2], step, normed, hidden, gate_up))
        gate_kernel(gate_up, rows, 2 * width, width, sizes.is_tanh == 1, gated, _threads(8 * rows * width, threads))
        to = made if layer[POST_MLP_NORM] else x
        bad = max(bad, _project(is_quantized, layer, DOWN, lora[3], step, gated, width, to))
        if layer[POST_MLP_NORM]:
            _norm_rows(made, rows, hidden, _NONE, layer[POST_MLP_NORM], eps, x, threads)
        if bad >= 0:
            return -2 - rows - bad
    return -1
