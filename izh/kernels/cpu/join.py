"""What the layers in one call are given, made ready and checked.

Owns: `join_layers`: the table of a model's weights by address, made once, and what a step brings to it.
Must not know: models, in which order the kernels run (`decoder.py`).
Invariant: an address that the kernel reads was checked for dtype, shape and layout, and its tensor is kept alive.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from izh.kernels.cpu import attention, linear, linear_quantized, lora
from izh.kernels.cpu.check import check
from izh.kernels.cpu.cut import describe_fault
from izh.kernels.cpu.decoder import (
    CORRECTED,
    DOWN,
    FIELDS,
    GATE_UP,
    INPUT_NORM,
    K_NORM,
    MLP_NORM,
    OUT,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    PROJECTIONS,
    Q_NORM,
    QKV,
    ROPE,
    WINDOW,
    Sizes,
    Step,
    layers_kernel,
    room_floats,
)
from izh.kernels.decoder import Corrections, CosSin, DecoderLayers, DecoderSizes, LayerWeights, Pages, Projection


class _Layers:
    """See `DecoderLayers`. Addresses of what never changes are taken once."""

    def __init__(self, layers: Sequence[LayerWeights], sizes: DecoderSizes) -> None:
        self._kept = layers
        self._is_quantized = None if isinstance(layers[0].qkv, tuple) else True
        num_recipes = max((layer.rope + 1 for layer in layers if layer.rope is not None), default=0)
        self._eps, self._scale = float(sizes.eps), float(sizes.scale)
        self._sizes = Sizes(
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
        self._corrections: Corrections | None = None
        self._plain = np.zeros((len(layers), PROJECTIONS, CORRECTED + 1), np.int64)
        self._corrected = self._plain

    def __call__(
        self,
        residual: Tensor,
        rotary: Sequence[CosSin],
        pages: Sequence[Pages],
        query_starts: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        write_slots: Tensor,
        corrections: Corrections | None,
    ) -> tuple[Tensor, Tensor]:
        sizes = self._sizes
        rows, hidden = check("residual", residual, torch.float32, 2, contiguous=True)
        if hidden != sizes.hidden:
            raise ValueError(f"residual: rows of {hidden} for layers of {sizes.hidden}")
        num_sequences, table_width = check("block_table", block_table, torch.int32, 2, contiguous=True)
        if len(rotary) < sizes.num_recipes:
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
        if corrections is not self._corrections:
            self._corrected = self._plain if corrections is None else self._take_corrections(corrections)
            self._corrections = corrections
        num_blocks, _, block, _ = pages[0][0].shape
        order, num_order, starts, adapters, num_groups = (
            (0,) * 5 if corrections is None else corrections.rows.host_memory
        )
        step = Step(
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
            order=order,
            num_order=num_order,
            starts=starts,
            adapters=adapters,
            num_groups=num_groups,
        )
        recipes = np.array([self._recipe(rows, *cos_sin) for cos_sin in rotary], np.int64)
        x, room = torch.empty(rows, hidden), torch.empty(room_floats(sizes, step))
        fault = layers_kernel(
            self._is_quantized, sizes, step, self._table.ctypes.data, self._corrected.ctypes.data,
            self._page_table.ctypes.data, recipes.ctypes.data, self._eps, self._scale, residual.data_ptr(),
            x.data_ptr(), room.data_ptr(),
        )  # fmt: skip
        if fault < -1 - rows:
            assert corrections is not None
            slot, start, stop = corrections.rows.groups[-2 - rows - fault]
            raise ValueError(
                f"corrections: rows {corrections.rows.order[start:stop].tolist()} of {rows} take slot {slot}: one of "
                "them, or the ranks there, is beyond what there is room for"
            )
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
        row = np.zeros(FIELDS, np.int64)
        for field, name, size in (
            (INPUT_NORM, "input_norm", sizes.hidden),
            (Q_NORM, "q_norm", sizes.head_dim),
            (K_NORM, "k_norm", sizes.head_dim),
            (POST_ATTENTION_NORM, "post_attention_norm", sizes.hidden),
            (MLP_NORM, "mlp_norm", sizes.hidden),
            (POST_MLP_NORM, "post_mlp_norm", sizes.hidden),
        ):
            norm = getattr(layer, name)
            if norm is not None:
                if check(name, norm, torch.float32, 1, contiguous=True)[0] != size:
                    raise ValueError(f"{name}: {len(norm)} entries for rows of {size}")
                row[field] = norm.data_ptr()
        if (layer.q_norm is None) != (layer.k_norm is None):
            raise ValueError("q_norm, k_norm: one of them is None; a layer has both or neither")
        row[ROPE] = -1 if layer.rope is None else layer.rope
        row[WINDOW] = attention.NO_WINDOW if layer.window is None else layer.window
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        for field, name, width, outputs in (
            (QKV, "qkv", sizes.hidden, q + 2 * kv),
            (OUT, "o", q, sizes.hidden),
            (GATE_UP, "gate_up", sizes.hidden, 2 * sizes.width),
            (DOWN, "down", sizes.width, sizes.hidden),
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

    def _take_corrections(self, corrections: Corrections) -> np.ndarray:
        """What the kernel reads of them. Raises: ValueError where they are not those of these layers."""
        table = np.zeros_like(self._plain)
        fields = QKV, OUT, GATE_UP, DOWN
        projections = corrections.projections or ()
        if len(projections) != len(table):
            raise ValueError(f"corrections: of {len(projections)} layers; these are {len(table)}")
        for i, of_layer in enumerate(projections):
            for number, (projection, field) in enumerate(zip(of_layer, fields, strict=True)):
                if projection is None:
                    continue
                weight = self._table[i, field + 2]
                if not isinstance(projection, lora.LoraLinear) or projection.memory[1] != weight:
                    raise ValueError(f"corrections: a {type(projection).__name__} in layer {i} is of another weight")
                table[i, number] = *projection.memory, True
        return table

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


def join_layers(layers: Sequence[LayerWeights], sizes: DecoderSizes) -> DecoderLayers:
    """See `Ops.join_layers`. Raises: ValueError naming what is no float32 on the CPU, or does not fit."""
    return _Layers(layers, sizes)
