"""Rotary frequencies: cos and sin for the rows of a step.

Owns: Rotary, one recipe's frequencies on the model's device.
Must not know: layers, batches, chunking.
Invariant: a row's cos and sin depend on its own position and length only, so they are the same however the prompt was
cut into chunks and whoever shares the batch.

cos and sin are computed per step rather than gathered from tables: for 32 rows that is 13 us against 6 us, and it
spares two [max positions, R/2] tables per recipe (270 MB for Gemma 3) and any limit on positions.
"""

import torch
from torch import Tensor

from izh.errors import ModelLoadError
from izh.model.spec import RopeSpec

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

_PARAMETERS = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
)


class Rotary:
    """One rotary recipe.

    angle[t, i] = position[t] * inv_freq[i], with inv_freq that of length n = lens[t]:
    - dynamic: theta is multiplied by (factor * max(n, max_position) / max_position - factor + 1) ** (R / (R - 2));
    - longrope: divided by long_factor when n > original_max_position_embeddings, else by short_factor;
    - every other type: independent of n.
    cos and sin are multiplied by the recipe's attention factor.

    This equals transformers for a whole-prompt prefill followed by decode, where n is the length seen so far.

    Raises ModelLoadError for an unknown type.
    Source: transformers, `modeling_rope_utils.ROPE_INIT_FUNCTIONS`, which computes the length-independent part.
    """

    def __init__(self, spec: RopeSpec, device: torch.device | str) -> None:
        if spec.type not in ROPE_TYPES:
            raise ModelLoadError(f"rope_type {spec.type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        self.spec = spec
        exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
        self.exponents = exponents.to(device)
        inv_freq, self.attention_factor = _inv_freq(spec, exponents, long=False)
        self.inv_freq = inv_freq.to(device)
        self.long_inv_freq: Tensor | None = None
        if spec.type == "longrope" and spec.short_factor != spec.long_factor:
            self.long_inv_freq = _inv_freq(spec, exponents, long=True)[0].to(device)

    def cos_sin(self, positions: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T], lens [T] -> cos, sin [T, R/2] float32."""
        angles = positions[:, None].float() * self._rows_inv_freq(lens)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin

    def _rows_inv_freq(self, lens: Tensor) -> Tensor:
        """[R/2] when every row has the same frequencies, else [T, R/2]."""
        spec = self.spec
        if spec.type == "dynamic":
            assert spec.factor is not None
            own = spec.max_position_embeddings
            stretch = spec.factor * lens.clamp(min=own).float() / own - (spec.factor - 1)
            theta = spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))
            return 1.0 / theta[:, None] ** self.exponents
        if self.long_inv_freq is not None:
            original = spec.original_max_position_embeddings
            assert original is not None
            return torch.where((lens > original)[:, None], self.long_inv_freq, self.inv_freq)
        return self.inv_freq


def _inv_freq(spec: RopeSpec, exponents: Tensor, long: bool) -> tuple[Tensor, float]:
    """Inverse frequencies [R/2] float32 and the attention factor, for a length within the original one or beyond it."""
    if spec.type in ("default", "dynamic"):
        return 1.0 / spec.theta**exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": spec.type, "rope_theta": spec.theta}
    for name in _PARAMETERS:
        value = getattr(spec, name)
        if value is not None:
            parameters[name] = list(value) if isinstance(value, tuple) else value
    # The functions read a config: the smallest one that says only this recipe, with one head of the rotary width.
    config = LlamaConfig(
        hidden_size=spec.rotary_dim,
        num_attention_heads=1,
        head_dim=spec.rotary_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=parameters,
    )
    original = spec.original_max_position_embeddings
    length = original + 1 if long and original is not None else None
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[spec.type](config, torch.device("cpu"), seq_len=length)
    return inv_freq, float(attention_factor)
