"""All layers of a decoder in one call: steps of few rows, and where weights have few bits, any.

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
SLICE = 512  # rows whose gates and ups fill an eighth of a large third cache, and keep two threads busy for long
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


@kernel()
def slice_rows(step: Any) -> int:
    """How many rows go through a part of a layer together."""
    return max(step.rows if step.num_groups else min(step.rows, SLICE), 1)


def room_floats(sizes: Sizes, step: Step) -> int:
    """Floats of all that lies between the parts, in the order in which `layers_kernel` cuts it up."""
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return step.rows * ((q + 2 * kv) + (q + kv) + q) + slice_rows(step) * (2 * sizes.hidden + 3 * sizes.width)


@kernel()
def _threads(floats: int, threads: int) -> int:
    return 1 if floats < PARALLEL_FLOATS else threads


@kernel()
def _project(
    is_quantized: Any, layer: Any, field: int, lora: Any, step: Any, x: int, rows: int, width: int, out: int
) -> int:  # fmt: skip
    """`is_quantized` None is no: of the two only the one that is meant is then compiled. -1, or a group of corrected
    rows that does not fit."""
    fixed = layer[field : field + _ROOM]
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
        linear_quantized.linear_at(fixed, x, rows, width, out, linear_quantized.NO_GATE, step.threads)
    return -1


@kernel()
def _gate(
    is_quantized: Any, layer: Any, lora: Any, sizes: Any, step: Any, x: int, rows: int, gate_up: int, out: int
) -> int:  # fmt: skip
    """Up, gated. Returns as `_project`."""
    width = sizes.width
    if is_quantized is not None and linear_quantized.can_gate(2 * width):
        gate = linear_quantized.GELU_TANH if sizes.is_tanh else linear_quantized.SILU
        fixed = layer[GATE_UP : GATE_UP + _ROOM]
        linear_quantized.linear_at(fixed, x, rows, sizes.hidden, out, gate, step.threads)
        return -1
    bad = _project(is_quantized, layer, GATE_UP, lora, step, x, rows, sizes.hidden, gate_up)
    gate_kernel(gate_up, rows, 2 * width, width, sizes.is_tanh == 1, out, _threads(8 * rows * width, step.threads))
    return bad


@kernel()
def _norm_rows(x: int, rows: int, width: int, residual: int, weight: int, eps: float, out: int, threads: int) -> None:
    """With a residual of address 0, the norm of x; else that of their sum, which is left there."""
    stride = width if residual else 0
    few = _threads(rows * width, threads)
    norm_kernel(x, rows, _ONE, width, _NONE, residual, stride, weight, width, eps, out, few)


@kernel()
def _turn(
    layer: Any, sizes: Any, step: Any, start: int, rows: int, eps: float, qkv: int, normed: int, rotary: Any,
    k_pages: int, v_pages: int,
) -> int:  # fmt: skip
    """Norms and rotation of the heads of rows [start, start + rows), at `qkv`; keys and values go to the pages. Queries
    stay, unless there are norms: then they go to `normed`. -1, or the row whose slot does not exist."""
    heads, kv_heads, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    row = (heads + 2 * kv_heads) * width
    q, q_row, k, k_row, v = qkv, row, qkv + 4 * heads * width, row, qkv + 4 * (heads + kv_heads) * width
    if layer[Q_NORM]:
        q, q_row, k, k_row = normed, heads * width, normed + 4 * step.rows * heads * width, kv_heads * width
        for source, number, to, weight in (
            (qkv, heads, q, layer[Q_NORM]), (qkv + 4 * heads * width, kv_heads, k, layer[K_NORM]),
        ):  # fmt: skip
            few = _threads(rows * number * width, step.threads)
            norm_kernel(source, rows * number, number, row, width, _NONE, _NONE, weight, width, eps, to, few)
    if layer[ROPE] >= 0:
        cos, sin, half = rotary[layer[ROPE]]
        few, at = _threads(rows * (heads + kv_heads) * width, step.threads), 4 * start * half
        rope_kernel(q, heads, q_row, width, k, kv_heads, k_row, width, rows, width, cos + at, sin + at, half, few)
    bad = write_kv_kernel(
        k, k_row, width, v, row, width, rows, kv_heads, width, k_pages, v_pages, step.num_blocks * step.block,
        step.block, step.slots + 8 * start, _threads(2 * rows * kv_heads * width, step.threads),
    )  # fmt: skip
    return -1 if bad < 0 else start + bad


@kernel()
def _attend(
    layer: Any, sizes: Any, step: Any, scale: float, qkv: int, normed: int, k_pages: int, v_pages: int, out: int
) -> int:
    """Attention of all rows. -1, or what attention's `find_fault` found."""
    heads, kv_heads, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    q, q_row = (normed, heads * width) if layer[Q_NORM] else (qkv, (heads + 2 * kv_heads) * width)
    return attention.paged_attention_kernel(
        q, q_row, width, k_pages, v_pages, step.num_blocks * kv_heads * step.block * width, step.query_starts,
        step.context_lens, step.block_table, step.num_sequences, step.table_width, step.rows, kv_heads,
        heads // kv_heads, width, step.block, scale, layer[WINDOW], step.threads, out,
    )  # fmt: skip


@kernel()
def layers_kernel(
    is_quantized: Any, sizes: Any, step: Any, table: int, corrections: int, pages: int, rotary: int, eps: float,
    scale: float, residual: int, x: int, room: int,
) -> int:  # fmt: skip
    """Leaves in `x` what is still to be added to `residual`. Returns -1; or what attention's `find_fault` found; or
    -2 - r for a row r whose slot does not exist; or -2 - rows - g for a group g of corrected rows that does not fit.

    Rows go through what is before attention, and through what is after it, SLICE at a time, so that what one part
    leaves is still in the caches when the next one reads it. Corrected rows, which are few, go together.
    """
    hidden, width, threads, all_rows = sizes.hidden, sizes.width, step.threads, step.rows
    q_width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    qkv_width = q_width + 2 * kv_width
    layers = carray(int64_at(table), (sizes.num_layers, FIELDS))
    all_corrections = carray(int64_at(corrections), (sizes.num_layers, PROJECTIONS, CORRECTED + 1))
    all_pages = carray(int64_at(pages), (sizes.num_layers, 2))
    recipes = carray(int64_at(rotary), (sizes.num_recipes, 3))
    most = slice_rows(step)
    qkv = room
    heads = qkv + 4 * all_rows * qkv_width
    attended = heads + 4 * all_rows * (q_width + kv_width)
    normed = attended + 4 * all_rows * q_width
    made = normed + 4 * most * hidden
    gate_up = made + 4 * most * hidden
    gated = gate_up + 4 * most * 2 * width
    for i in range(sizes.num_layers):
        layer, lora = layers[i], all_corrections[i]
        k_pages, v_pages = all_pages[i]
        bad = np.int64(-1)
        for start in range(0, all_rows, most):
            rows = min(most, all_rows - start)
            at, some = 4 * start * hidden, qkv + 4 * start * qkv_width
            if i == 0:
                _norm_rows(residual + at, rows, hidden, _NONE, layer[INPUT_NORM], eps, normed, threads)
            else:
                _norm_rows(x + at, rows, hidden, residual + at, layer[INPUT_NORM], eps, normed, threads)
            bad = max(bad, _project(is_quantized, layer, QKV, lora[0], step, normed, rows, hidden, some))
            row = _turn(
                layer, sizes, step, start, rows, eps, some, heads + 4 * start * q_width, recipes, k_pages, v_pages
            )
            if row >= 0:
                return -2 - row
        fault = _attend(layer, sizes, step, scale, qkv, heads, k_pages, v_pages, attended)
        if fault != -1:
            return fault
        for start in range(0, all_rows, most):
            rows = min(most, all_rows - start)
            here, total = x + 4 * start * hidden, residual + 4 * start * hidden
            to = made if layer[POST_ATTENTION_NORM] else here
            some = attended + 4 * start * q_width
            bad = max(bad, _project(is_quantized, layer, OUT, lora[1], step, some, rows, q_width, to))
            if layer[POST_ATTENTION_NORM]:
                _norm_rows(made, rows, hidden, _NONE, layer[POST_ATTENTION_NORM], eps, here, threads)
            _norm_rows(here, rows, hidden, total, layer[MLP_NORM], eps, normed, threads)
            bad = max(bad, _gate(is_quantized, layer, lora[2], sizes, step, normed, rows, gate_up, gated))
            to = made if layer[POST_MLP_NORM] else here
            bad = max(bad, _project(is_quantized, layer, DOWN, lora[3], step, gated, rows, width, to))
            if layer[POST_MLP_NORM]:
                _norm_rows(made, rows, hidden, _NONE, layer[POST_MLP_NORM], eps, here, threads)
        if bad >= 0:
            return -2 - all_rows - bad
    return -1
