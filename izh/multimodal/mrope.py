"""Rotary positions with three axes, as a function.

Owns: `mrope_cos_sin`, the public face of what the decoder computes in a step (izh/model/rope.py).
Must not know: prompts, requests.
"""

import torch
from torch import Tensor

from izh.model.rope import Mrope, Rotary
from izh.model.spec import RopeSpec


def mrope_cos_sin(
    positions: Tensor,
    head_dim: int,
    theta: float,
    sections: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """cos and sin of each row's frequency pairs, computed in float32 and rounded to `dtype`.

    Semantics: angle[n, i] = positions[axis(i), n] * theta ** (-2i / head_dim), axis(i) as in `izh.model.rope.Mrope`.
    The layout is split-half: pair i rotates the features i and i + head_dim / 2. Equal coordinates give ordinary RoPE,
    bit for bit.
    Shapes: positions [3, N] integers (time, height, width) -> cos, sin [N, head_dim / 2].
    Raises: ValueError when `positions` has another shape, or twice the sum of `sections` is not `head_dim`.
    """
    if positions.dim() != 2 or positions.shape[0] != 3 or positions.is_floating_point():
        raise ValueError(f"positions must be integers [3, N], got {positions.dtype} {list(positions.shape)}")
    spec = RopeSpec(type="default", theta=theta, rotary_dim=head_dim, max_position_embeddings=positions.shape[1])
    rotary = Rotary(spec, positions.device)
    rotary.set_mrope(Mrope(sections, interleaved))
    cos, sin = rotary.cos_sin(positions, positions[0])
    return cos.to(dtype), sin.to(dtype)
