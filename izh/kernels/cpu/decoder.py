"""All layers of a decoder in one call, for steps of few rows.

Owns: the walk through the layers, and the room for what lies between their parts.
Must not know: the arithmetic. It calls the kernels that the ops are made of, in the order in which modules do.
Invariant: to the last bit what the ops give one after another.

At one row a step is some 300 kernels of a few microseconds, and what Python does around one takes as long again, the
more so as the weights that stream by leave nothing of the interpreter in the caches. So it is left once for all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import carray
from torch import Tensor

from izh.kernels.cpu import attention, linear, linear_quantized
from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import int64_at, kernel
from izh.kernels.cpu.cut import describe_fault
from izh.kernels.cpu.elementwise import (
    PARALLEL_FLOATS,
    gate_kernel,
    norm_kernel,
    rope_kernel,
    write_kv_kernel,
)
from izh.kernels.decoder import CosSin, DecoderLayers, DecoderSizes, LayerWeights, Pages, Projection

# A layer's row of the table: addresses of norms (0 = none), which recipe of rotation (-1 = none), the window, and four
# projections as `linear_at` wants them.
_INPUT_NORM, _Q_NORM, _K_NORM, _POST_ATTENTION_NORM, _MLP_NORM, _POST_MLP_NORM, _ROPE, _WINDOW = range(8)
_ROOM = 12  # numbers of a projection, filled up
_QKV, _O, _GATE_UP, _DOWN = range(8, 8 + 4 * _ROOM, _ROOM)
_FIELDS = _DOWN + _ROOM
_NONE, _ONE = np.int64(0), np.int64(1)  # as a literal, each would be a signature of its own


class _Sizes(NamedTuple):
    """Of the model."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    num_recipes: int
    is_tanh: int


class _Step(NamedTuple):
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


@kernel()
def _threads(floats: int, threads: int) -> int:
    return 1 if floats < PARALLEL_FLOATS else threads


@kernel()
def _project(
    is_quantized: Any, layer: Any, field: int, x: int, rows: int, width: int, out: int, threads: int
) -> None:  # fmt: skip
    """`is_quantized` None is no: of the two only the one that is meant is then compiled."""
    fixed = layer[field : field + _ROOM]
    if is_quantized is None:
        linear.linear_at(fixed, x, rows, width, out, threads)
    else:
        linear_quantized.linear_at(fixed, x, rows, width, out, threads)


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
    """Attention of the rows of `qkv`; `normed` is room for queries and keys. -1, or a fault as `_layers` has it."""
    rows, heads, kv_heads, width = step.rows, sizes.heads, sizes.kv_heads, sizes.head_dim
    row = (heads + 2 * kv_heads) * width
    q, q_row, k, k_row, v = qkv, row, qkv + 4 * heads * width, row, qkv + 4 * (heads + kv_heads) * width
    if layer[_Q_NORM]:
        q, q_row, k, k_row = normed, heads * width, normed + 4 * rows * heads * width, kv_heads * width
        for source, number, to, weight in (
            (qkv, heads, q, layer[_Q_NORM]), (qkv + 4 * heads * width, kv_heads, k, layer[_K_NORM]),
        ):  # fmt: skip
            few = _threads(rows * number * width, step.threads)
            norm_kernel(source, rows * number, number, row, width, _NONE, _NONE, weight, width, eps, to, few)
    if layer[_ROPE] >= 0:
        cos, sin, half = rotary[layer[_ROPE]]
        few = _threads(rows * (heads + kv_heads) * width, step.threads)
        rope_kernel(q, heads, q_row, width, k, kv_heads, k_row, width, rows, width, cos, sin, half, few)
    bad = write_kv_kernel(
        k, k_row, width, v, row, width, rows, kv_heads, width, k_pages, v_pages, step.num_blocks * step.block,
        step.block, step.slots, _threads(2 * rows * kv_heads * width, step.threads),
    )  # fmt: skip
    if bad >= 0:
        return -2 - bad
    return attention._paged_attention(
        q, q_row, width, k_pages, v_pages, step.num_blocks * kv_heads * step.block * width, step.query_starts,
        step.context_lens, step.block_table, step.num_sequences, step.table_width, rows, kv_heads, heads // kv_heads,
        width, step.block, scale, layer[_WINDOW], step.threads, out,
    )  # fmt: skip


@kernel()
def _layers(
    is_quantized: Any, sizes: Any, step: Any, table: int, pages: int, rotary: int, eps: float, scale: float,
    residual: int, x: int, room: int,
) -> int:  # fmt: skip
    """Leaves in `x` what is still to be added to `residual`. Returns -1; or what attention's `find_fault` found; or
    -2 - r for a row r whose slot does not exist."""
    rows, hidden, width, threads = step.rows, sizes.hidden, sizes.width, step.threads
    q_width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layers = carray(int64_at(table), (sizes.num_layers, _FIELDS))
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
        layer = layers[i]
        if i == 0:
            _norm_rows(residual, rows, hidden, _NONE, layer[_INPUT_NORM], eps, normed, threads)
        else:
            _norm_rows(x, rows, hidden, residual, layer[_INPUT_NORM], eps, normed, threads)
        _project(is_quantized, layer, _QKV, normed, rows, hidden, qkv, threads)
        fault = _attend(layer, sizes, step, scale, eps, qkv, heads, recipes, all_pages[i, 0], all_pages[i, 1], attended)
        if fault != -1:
            return fault
        to = made if layer[_POST_ATTENTION_NORM] else x
        _project(is_quantized, layer, _O, attended, rows, q_width, to, threads)
        if layer[_POST_ATTENTION_NORM]:
            _norm_rows(made, rows, hidden, _NONE, layer[_POST_ATTENTION_NORM], eps, x, threads)
        _norm_rows(x, rows, hidden, residual, layer[_MLP_NORM], eps, normed, threads)
        _project(is_quantized, layer, _GATE_UP, normed, rows, hidden, gate_up, threads)
        gate_kernel(gate_up, rows, 2 * width, width, sizes.is_tanh == 1, gated, _threads(8 * rows * width, threads))
        to = made if layer[_POST_MLP_NORM] else x
        _project(is_quantized, layer, _DOWN, gated, rows, width, to, threads)
        if layer[_POST_MLP_NORM]:
            _norm_rows(made, rows, hidden, _NONE, layer[_POST_MLP_NORM], eps, x, threads)
    return -1


class _Layers:
    """See `DecoderLayers`. Addresses of what never changes are taken once."""

    def __init__(self, layers: Sequence[LayerWeights], sizes: DecoderSizes) -> None:
        self._kept = layers
        self._is_quantized = None if isinstance(layers[0].qkv, tuple) else True
        num_recipes = max((layer.rope + 1 for layer in layers if layer.rope is not None), default=0)
        self._eps, self._scale = float(sizes.eps), float(sizes.scale)
        self._sizes = _Sizes(
            num_layers=len(layers),
            hidden=layers[0].input_norm.shape[0],
            heads=sizes.num_heads,
            kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            width=sizes.intermediate_size,
            num_recipes=num_recipes,
            is_tanh=int(sizes.activation == "gelu_tanh"),
        )
        self._table = np.stack([self._row(layer) for layer in layers])
        self._pages: Sequence[Pages] | None = None
        self._page_table = np.zeros((0, 2), np.int64)

    def __call__(
        self,
        residual: Tensor,
        rotary: Sequence[CosSin],
        pages: Sequence[Pages],
        query_starts: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        write_slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        sizes = self._sizes
        rows, hidden = check("residual", residual, torch.float32, 2, contiguous=True)
        if hidden != sizes.hidden:
            raise ValueError(f"residual: rows of {hidden} for layers of {sizes.hidden}")
        num_sequences, table_width = check("block_table", block_table, torch.int32, 2, contiguous=True)
        if len(rotary) != sizes.num_recipes:
            raise ValueError(f"rotary: {len(rotary)} recipes for layers that name {sizes.num_recipes}")
        for name, tensor, dtype, entries in (
            ("query_starts", query_starts, torch.int32, num_sequences + 1),
            ("context_lens", context_lens, torch.int32, num_sequences),
            ("write_slots", write_slots, torch.int64, rows),
        ):
            if check(name, tensor, dtype, 1, contiguous=True)[0] != entries:
                raise ValueError(f"{name}: {len(tensor)} entries for {rows} rows of {num_sequences} sequences")
        if pages is not self._pages:
            self._take(pages)
        num_blocks, _, block, _ = pages[0][0].shape
        step = _Step(
            rows=rows,
            num_sequences=num_sequences,
            table_width=table_width,
            query_starts=query_starts.data_ptr(),
            context_lens=context_lens.data_ptr(),
            block_table=block_table.data_ptr(),
            slots=write_slots.data_ptr(),
            num_blocks=num_blocks,
            block=block,
            threads=numba.get_num_threads(),
        )
        recipes = np.array([self._recipe(rows, *cos_sin) for cos_sin in rotary], np.int64)
        x, room = torch.empty(rows, hidden), torch.empty(rows, _room(sizes))
        fault = _layers(
            self._is_quantized, sizes, step, self._table.ctypes.data, self._page_table.ctypes.data,
            recipes.ctypes.data, self._eps, self._scale, residual.data_ptr(), x.data_ptr(), room.data_ptr(),
        )  # fmt: skip
        if fault < -1:
            row = -2 - fault
            raise ValueError(
                f"write_slots: row {row} has slot {int(write_slots[row])}, but the pages hold {num_blocks * block}"
            )
        if fault >= 0:
            raise ValueError(describe_fault(fault, query_starts, context_lens, block_table, pages[0][0]))
        return x, residual

    def _row(self, layer: LayerWeights) -> np.ndarray:
        """The layer's row of the table. Raises: ValueError naming what does not fit."""
        sizes = self._sizes
        row = np.zeros(_FIELDS, np.int64)
        for field, name, size in (
            (_INPUT_NORM, "input_norm", sizes.hidden),
            (_Q_NORM, "q_norm", sizes.head_dim),
            (_K_NORM, "k_norm", sizes.head_dim),
            (_POST_ATTENTION_NORM, "post_attention_norm", sizes.hidden),
            (_MLP_NORM, "mlp_norm", sizes.hidden),
            (_POST_MLP_NORM, "post_mlp_norm", sizes.hidden),
        ):
            norm = getattr(layer, name)
            if norm is not None:
                if check(name, norm, torch.float32, 1, contiguous=True)[0] != size:
                    raise ValueError(f"{name}: {len(norm)} entries for rows of {size}")
                row[field] = norm.data_ptr()
        if (layer.q_norm is None) != (layer.k_norm is None):
            raise ValueError("q_norm, k_norm: one of them is None; a layer has both or neither")
        row[_ROPE] = -1 if layer.rope is None else layer.rope
        row[_WINDOW] = attention._NO_WINDOW if layer.window is None else layer.window
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        for field, name, width, outputs in (
            (_QKV, "qkv", sizes.hidden, q + 2 * kv),
            (_O, "o", q, sizes.hidden),
            (_GATE_UP, "gate_up", sizes.hidden, 2 * sizes.width),
            (_DOWN, "down", sizes.width, sizes.hidden),
        ):
            fixed = self._fixed_arguments(name, getattr(layer, name))
            if fixed[:2] != (outputs, width):
                raise ValueError(f"{name}: {fixed[1]} -> {fixed[0]}; the sizes say {width} -> {outputs}")
            row[field : field + len(fixed)] = fixed
        return row

    def _fixed_arguments(self, name: str, projection: Projection) -> tuple[int, ...]:
        if isinstance(projection, tuple) and self._is_quantized is None:
            return linear.fixed_arguments(*projection)
        if isinstance(projection, linear_quantized.PackedLinear) and self._is_quantized is not None:
            return projection.fixed_arguments
        raise ValueError(f"{name}: a {type(projection).__name__}; all projections are floats, or all have few bits")

    def _take(self, pages: Sequence[Pages]) -> None:
        """Keep the addresses of these pages, those of the steps to come."""
        shape = None
        for of_layer in pages:
            for each in of_layer:
                shape = shape or each.shape
                if check("pages", each, torch.float32, 4, contiguous=True) != shape:
                    raise ValueError(f"pages: shapes {tuple(shape)} and {tuple(each.shape)}; all have the same")
        expected = (self._sizes.kv_heads, self._sizes.head_dim)
        if len(pages) != self._sizes.num_layers or shape is None or (shape[1], shape[3]) != expected:
            raise ValueError(f"pages: {len(pages)} layers of {shape} for {self._sizes}")
        self._page_table = np.array([[k.data_ptr(), v.data_ptr()] for k, v in pages], np.int64)
        self._pages = pages

    def _recipe(self, rows: int, cos: Tensor, sin: Tensor) -> tuple[int, int, int]:
        """Addresses, and half the rotated width. Raises: ValueError naming the argument."""
        shape = check("cos", cos, torch.float32, 2, contiguous=True)
        if shape[0] != rows or 2 * shape[1] > self._sizes.head_dim:
            raise ValueError(f"cos: shape {tuple(shape)} for {rows} rows of heads {self._sizes.head_dim} wide")
        if check("sin", sin, torch.float32, 2, contiguous=True) != shape:
            raise ValueError(f"sin: shape {tuple(sin.shape)} differs from cos {tuple(shape)}")
        return cos.data_ptr(), sin.data_ptr(), shape[1]


def _room(sizes: _Sizes) -> int:
    """Floats of a row of all that lies between the parts, in the order in which `_layers` cuts it up."""
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return 2 * sizes.hidden + (q + 2 * kv) + (q + kv) + q + 3 * sizes.width


def join_layers(layers: Sequence[LayerWeights], sizes: DecoderSizes) -> DecoderLayers:
    """See `Ops.join_layers`. Raises: ValueError naming what is no float32 on the CPU, or does not fit."""
    return _Layers(layers, sizes)
