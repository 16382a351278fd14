"""What a bidirectional encoder is, in numbers, and which checkpoints are one that we compute ourselves.

Owns: EncoderSpec and its reading from a config (`native_spec`).
Must not know: torch, files. Configs are transformers config objects, so class defaults are already filled in.
Invariant: a config for which `native_spec` gives a spec is computed in full; any other gives None and runs elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from izh.kernels.ops import Activation

HeadKind = Literal["bert", "roberta", "modernbert"]
"""How a family makes class scores of a pooled row: see `heads.py`."""

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, kw_only=True)
class EncoderLayerSpec:
    """What differs from layer to layer."""

    window: int | None = None  # keys a row sees on either side of itself; None: all
    rope_theta: float | None = None  # None: no rotary positions


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Everything an encoder needs besides its weights.

    Post-norm (BERT): x = norm(x + attention(x)); x = norm(x + mlp(x)), positions and types are learned rows.
    Pre-norm (ModernBERT): x += attention(norm(x)); x += mlp(norm(x)), positions are rotary, the MLP is gated.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    max_length: int  # longest sequence in tokens
    norm_eps: float
    activation: Activation
    layers: tuple[EncoderLayerSpec, ...]
    head: HeadKind
    head_pooling: Literal["cls", "mean"] = "cls"
    head_activation: Activation = "none"
    num_types: int = 0
    padding_id: int | None = None  # RoBERTa counts positions from padding_id + 1 and leaves this id out of the count
    is_pre_norm: bool = False
    has_norm_bias: bool = True
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    has_head_bias: bool = True  # of the head's hidden layer; its last layer always has one

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def native_spec(config: Any) -> EncoderSpec | None:
    """The encoder that a config describes, or None when it is not of a family, or not of a form, that we compute."""
    read = _FAMILIES.get(config.model_type)
    if read is None or config.hidden_size % config.num_attention_heads:
        return None
    return read(config)


def _bert(config: Any) -> EncoderSpec | None:
    is_roberta = config.model_type != "bert"
    if (
        config.hidden_act not in _ACTIVATIONS
        or getattr(config, "position_embedding_type", "absolute") != "absolute"
        or getattr(config, "is_decoder", False)
    ):
        return None
    padding_id = config.pad_token_id if is_roberta else None
    if is_roberta and padding_id is None:
        return None
    return EncoderSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        max_length=config.max_position_embeddings - (0 if padding_id is None else padding_id + 1),
        norm_eps=config.layer_norm_eps,
        activation=_ACTIVATIONS[config.hidden_act],
        layers=(EncoderLayerSpec(),) * config.num_hidden_layers,
        head="roberta" if is_roberta else "bert",
        num_types=config.type_vocab_size,
        padding_id=padding_id,
    )


def _modernbert(config: Any) -> EncoderSpec | None:
    ropes = config.rope_parameters
    used = {kind: ropes.get(kind) or {} for kind in set(config.layer_types)}
    if (
        config.hidden_activation not in _ACTIVATIONS
        or config.classifier_activation not in _ACTIVATIONS
        or any(rope.get("rope_type") != "default" for rope in used.values())
    ):
        return None
    layers = tuple(
        EncoderLayerSpec(
            window=config.local_attention // 2 if kind == "sliding_attention" else None,
            rope_theta=used[kind]["rope_theta"],
        )
        for kind in config.layer_types
    )
    return EncoderSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        max_length=config.max_position_embeddings,
        norm_eps=config.norm_eps,
        activation=_ACTIVATIONS[config.hidden_activation],
        layers=layers,
        head="modernbert",
        head_pooling=config.classifier_pooling,
        head_activation=_ACTIVATIONS[config.classifier_activation],
        is_pre_norm=True,
        has_norm_bias=config.norm_bias,
        has_attention_bias=config.attention_bias,
        has_mlp_bias=config.mlp_bias,
        has_head_bias=config.classifier_bias,
    )


_FAMILIES: dict[str, Callable[[Any], EncoderSpec | None]] = {
    "bert": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "camembert": _bert,
    "modernbert": _modernbert,
}
