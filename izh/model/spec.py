"""What a decoder is, in numbers.

Owns: ModelSpec, LayerSpec and RopeSpec, the frozen description that every later choice reads (memory, kernels, keys).
Must not know: torch, checkpoints, transformers; a family (`families/`) fills a ModelSpec from a model's config.
Invariant: two models whose specs and weights are equal compute the same function.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One rotary recipe: the kind of scaling and its parameters, under the names transformers gives them.

    `rotary_dim` is the rotated width R <= head_dim. `max_position_embeddings` is the model's own. Parameters a type
    does not use are None. `mrope_sections` are those of a model with three position axes (M-RoPE, izh/model/rope.py).
    """

    type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    mrope_sections: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False

    def length_key(self, num_prompt: int) -> bytes:
        """What tells the KV of a prompt this long from the KV of a shorter one with the same tokens; b"" if nothing.

        A row's frequencies are those of length max(num_prompt, position + 1). Dynamic scaling uses that length itself
        once it passes the model's own, so every longer prompt has KV of its own; longrope only switches between two
        sets, so all prompts beyond the original length share theirs.
        """
        if self.type == "dynamic" and num_prompt > self.max_position_embeddings:
            return b"dynamic:%d" % num_prompt
        if self.type == "longrope" and self.short_factor != self.long_factor:
            assert self.original_max_position_embeddings is not None
            return b"long" if num_prompt > self.original_max_position_embeddings else b""
        return b""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What differs from layer to layer."""

    window: int | None = None  # keys a query sees, itself included; None: all before it
    rope: int | None = 0  # index into ModelSpec.ropes; None: no rotary positions (NoPE)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything a decoder needs besides its weights."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Activation
    attention_scale: float
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool = False
    has_lm_head: bool = True  # False: a checkpoint of hidden rows alone, such as an embedding model; then tied
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each query and key head before rotation
    sandwich_norms: bool = False  # a norm also after attention and after the MLP, before each is added to the residual
    norm_offset: float = 0.0  # added to every norm weight at load (checkpoints that store w - 1)
    embed_scale: float = 1.0  # token embeddings are multiplied by this; overrides are not
    logits_softcap: float | None = None  # c: logits become c * tanh(logits / c)
    images_both_ways: bool = False  # rows of an image that lie side by side see each other, not only those before
    num_deepstack: int = 0  # first layers after each of which an image's rows get further rows of their own added

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def image_row_width(self) -> int:
        """Numbers that one row of an image has: its embedding, then what is added after each deepstack layer."""
        return self.hidden_size * (1 + self.num_deepstack)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the query, key and value parts of the fused projection."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens, the model is meant for. Dynamic rotary scaling reaches beyond its positions."""
        stretches = [rope.factor for rope in self.ropes if rope.type == "dynamic" and rope.factor is not None]
        return int(self.max_position_embeddings * max(stretches, default=1.0))

    def length_key(self, num_prompt: int) -> bytes:
        """The recipes' length keys together: part of a cached block's identity. Pure."""
        return b"|".join(key for rope in self.ropes if (key := rope.length_key(num_prompt)))
