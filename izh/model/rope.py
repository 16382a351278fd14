"""Rotary frequencies: cos and sin for the rows of a step.

Owns: Rotary, one recipe's frequencies on the model's device; Mrope, which of them turn with which position axis.
Must not know: layers, batches, chunking.
Invariant: a row's cos and sin depend on its own position and length only, so they are the same however the prompt was
cut into chunks and whoever shares the batch.

cos and sin are computed per step rather than gathered from tables: for 32 rows that is 13 us against 6 us, and it
spares two [max positions, R/2] tables per recipe (270 MB for Gemma 3) and any limit on positions.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Mrope:
    """How a model with three position axes (M-RoPE) deals its frequency pairs out to time, height and width.

    In order (Qwen2-VL): the first sections[0] pairs turn with time, the next sections[1] with height, the rest with
    width. Interleaved (Qwen3-VL): of the pairs below 3 * sections[1], every third from 1 on turns with height; of those
    below 3 * sections[2], every third from 2 on with width; all others with time.

    Source: transformers, `recomposition_frequencies` of modeling_qwen2_vl and modeling_qwen3_vl.
    """

    sections: tuple[int, int, int]
    interleaved: bool = False

    def axes(self, rotary_dim: int) -> list[int]:
        """The axis (0 time, 1 height, 2 width) of each of the rotary_dim / 2 frequency pairs.

        Raises ValueError when the sections do not deal out exactly that many.
        """
        sections = self.sections
        if len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != rotary_dim:
            raise ValueError(
                f"sections must be 3 counts of frequency pairs with the sum {rotary_dim / 2:g}, half the rotated width "
                f"{rotary_dim}; got {sections}"
            )
        if not self.interleaved:
            return [axis for axis, count in enumerate(sections) for _ in range(count)]
        axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(rotary_dim // 2)]
        if any(axes.count(axis) != count for axis, count in enumerate(sections)):
            raise ValueError(f"sections {sections} cannot be interleaved over {rotary_dim // 2} frequency pairs")
        return axes


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
        self.mrope: Mrope | None = None
        self._axes: Tensor | None = None  # [R/2] int64: the position axis of each frequency pair
        if spec.mrope_sections is not None:
            self.set_mrope(Mrope(spec.mrope_sections, spec.mrope_interleaved))

    def set_mrope(self, mrope: Mrope) -> None:
        """From here on rows may have three coordinates. Raises ValueError when the sections do not fit."""
        self._axes = torch.tensor(mrope.axes(self.spec.rotary_dim), device=self.inv_freq.device)
        self.mrope = mrope

    def cos_sin(self, positions: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T], or [3, T] once M-RoPE is set; lens [T] -> cos, sin [T, R/2] float32.

        A row whose three coordinates are equal gets the very numbers that one position gives it.
        """
        if positions.dim() == 1:
            own = positions[:, None]
        else:
            assert self._axes is not None, "three position axes, but no sections that say which pair follows which"
            own = positions.t().index_select(1, self._axes)
        angles = own.float() * self._rows_inv_freq(lens)
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
