"""All layers of a decoder as one op: what it is given.

Owns: LayerWeights and DecoderSizes, which say what the layers are; Corrections, what adapters add to them in a step;
DecoderLayers, what computes them.
Must not know: modules, how a kernel does it. `izh/model/layers.py` is the definition of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from torch import Tensor

from izh.kernels.lora import AdapterRows

if TYPE_CHECKING:
    from izh.kernels.ops import LoraLinear, QuantizedLinear

CosSin = tuple[Tensor, Tensor]
Pages = tuple[Tensor, Tensor]
Projection: TypeAlias = "tuple[Tensor, Tensor | None] | QuantizedLinear"
"""Weight [N, K] and bias [N] or None; or what the same table's `quantize_linear` made. All have the same kind."""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer's. Norms that a family does not have are None. `rope`: which of the step's recipes turns queries and
    keys, None for no rotation; `window` as in `Ops.paged_attention`."""

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    post_mlp_norm: Tensor | None
    rope: int | None
    window: int | None


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """What all layers share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    scale: float
    activation: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, eq=False)
class Corrections:
    """What a step's rows add to projections: of each layer's qkv, o, gate_up and down, what computes it with the
    corrections of `rows`, or None where no row has any. No projections: there is more to it, which modules do. The same
    object says the same."""

    rows: AdapterRows
    projections: Sequence[tuple[LoraLinear | None, ...]] | None


class DecoderLayers(Protocol):
    """Layers that keep their weights alive."""

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
        """residual [T, D] -> (what is still to be added, residual), both [T, D], after the last layer. `rotary` has cos
        and sin [T, R/2] of each recipe, `pages` k_pages and v_pages of each layer. Modifies the pages and may work in
        place on `residual`."""
        ...
