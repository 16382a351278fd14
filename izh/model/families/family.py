"""What a family of checkpoints is, and the pieces families share.

Owns: Family (a config mapping plus a table of weight names), the common part of the config mapping, and the refusal of
config fields that change the maths and are not implemented.
Must not know: files, torch modules. Configs are transformers config objects, so class defaults are already filled in.
Invariant: a config that is accepted is computed in full; nothing in it is skipped silently.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from izh.errors import ModelLoadError
from izh.model.rope import ROPE_TYPES, Mrope
from izh.model.spec import Activation, LayerSpec, ModelSpec, RopeSpec

ModuleTable = Mapping[str, tuple[str, str | None]]
"""Checkpoint module -> (decoder module, which part of it: q, k, v, gate, up, or None for all). {i} is the layer."""

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

LLAMA_MODULES: ModuleTable = {
    "embed_tokens": ("embed_tokens", None),
    "layers.{i}.input_layernorm": ("layers.{i}.input_norm", None),
    "layers.{i}.self_attn.q_proj": ("layers.{i}.attention.qkv_proj", "q"),
    "layers.{i}.self_attn.k_proj": ("layers.{i}.attention.qkv_proj", "k"),
    "layers.{i}.self_attn.v_proj": ("layers.{i}.attention.qkv_proj", "v"),
    "layers.{i}.self_attn.q_norm": ("layers.{i}.attention.q_norm", None),
    "layers.{i}.self_attn.k_norm": ("layers.{i}.attention.k_norm", None),
    "layers.{i}.self_attn.o_proj": ("layers.{i}.attention.o_proj", None),
    "layers.{i}.post_attention_layernorm": ("layers.{i}.mlp_norm", None),
    "layers.{i}.mlp.gate_proj": ("layers.{i}.mlp.gate_up_proj", "gate"),
    "layers.{i}.mlp.up_proj": ("layers.{i}.mlp.gate_up_proj", "up"),
    "layers.{i}.mlp.down_proj": ("layers.{i}.mlp.down_proj", None),
    "norm": ("norm", None),
    "lm_head": ("lm_head", None),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one HF model_type becomes a decoder.

    A checkpoint's tensor name loses the first of `prefixes` it starts with, then must be in `modules`. Tensors that
    start with one of `other_parts` belong to parts that are not the decoder (an image encoder).
    """

    model_type: str
    to_spec: Callable[[Any, tuple[int, ...]], ModelSpec]
    modules: ModuleTable
    prefixes: tuple[str, ...] = ("model.",)
    other_parts: tuple[str, ...] = ()


def refuse(config: Any, **allowed: Iterable[Any]) -> None:
    """Raise ModelLoadError for a field of `config` whose value is not among the `allowed` ones.

    A field the config does not have was not set by the checkpoint either.
    """
    for name, values in allowed.items():
        value = getattr(config, name, None)
        if value is not None and value not in values:
            raise ModelLoadError(
                f"{config.model_type} config: {name}={value!r} is not supported; "
                f"supported: {', '.join(repr(v) for v in values) or 'leaving it out'}"
            )


def common_fields(config: Any, activation: str) -> dict[str, Any]:
    """The ModelSpec fields that every family spells alike. `activation` is the config's name for the MLP's."""
    if activation not in ACTIVATIONS:
        raise ModelLoadError(
            f"{config.model_type} config: activation {activation!r} is not supported; "
            f"supported: {', '.join(ACTIVATIONS)}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelLoadError(
            f"{config.model_type} config: num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    head_dim = head_dim_of(config)
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "activation": ACTIVATIONS[activation],
        "attention_scale": head_dim**-0.5,
        # The text configs of some image-text models leave this to the outer one.
        "tie_word_embeddings": getattr(config, "tie_word_embeddings", False),
    }


def head_dim_of(config: Any) -> int:
    """Width of a head. Some config classes have no such field, and it is then the hidden size split evenly."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layers_of(config: Any, layer_types: Iterable[str], window: int | None) -> tuple[LayerSpec, ...]:
    """One LayerSpec for each layer type: 'full_attention' or 'sliding_attention' (of `window` keys)."""
    layers = []
    for index, layer_type in enumerate(layer_types):
        if layer_type == "full_attention":
            layers.append(LayerSpec())
        elif layer_type == "sliding_attention" and window is not None:
            layers.append(LayerSpec(window=window))
        else:
            raise ModelLoadError(
                f"{config.model_type} config: layer_types[{index}]={layer_type!r} with sliding_window={window!r} is "
                "not supported; supported: 'full_attention', or 'sliding_attention' with a sliding_window"
            )
    if len(layers) != config.num_hidden_layers:
        raise ModelLoadError(
            f"{config.model_type} config: layer_types has {len(layers)} entries, "
            f"num_hidden_layers is {config.num_hidden_layers}"
        )
    return tuple(layers)


_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_ROPE_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # type -> (needed, optional)
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor", "original_max_position_embeddings"), _YARN),
    "longrope": (
        ("original_max_position_embeddings", "short_factor", "long_factor"),
        ("factor", "attention_factor"),
    ),
}
_EVERY_TYPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_MROPE = {None: (), "in order": ("mrope_section",), "interleaved": ("mrope_section", "mrope_interleaved")}
_KNOWN = _EVERY_TYPE.union(*(needed + optional for needed, optional in _ROPE_PARAMETERS.values()))


def rope_of(
    config: Any,
    parameters: Mapping[str, Any],
    partial: bool = False,
    mrope: Literal["in order", "interleaved"] | None = None,
) -> RopeSpec:
    """The recipe that one `rope_parameters` dict describes; `partial`: the family can rotate a part of a head; `mrope`:
    how it deals the frequencies out to three position axes, if it has them."""
    kind = parameters["rope_type"]
    where = f"{config.model_type} config: rope_parameters"
    if kind not in _ROPE_PARAMETERS:
        raise ModelLoadError(f"{where}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    fraction = parameters.get("partial_rotary_factor") or 1.0
    if fraction != 1.0 and not partial:
        raise ModelLoadError(f"{where}: partial_rotary_factor={fraction!r} is not supported here, only 1")
    unknown = sorted(set(parameters) - _KNOWN - set(_MROPE[mrope]))
    if unknown:
        raise ModelLoadError(f"{where}: {unknown[0]}={parameters[unknown[0]]!r} is not supported")
    needed, optional = _ROPE_PARAMETERS[kind]
    values: dict[str, Any] = {}
    for name in needed + optional:  # a known parameter of another type is ignored, as in the reference
        value = parameters.get(name)
        if value is not None:
            values[name] = tuple(map(float, value)) if isinstance(value, list | tuple) else value
        elif name in needed:
            raise ModelLoadError(f"{where}: {name} is missing, and rope_type {kind!r} needs it")
    rotary_dim = int(head_dim_of(config) * fraction)
    for name in ("short_factor", "long_factor"):
        if len(values.get(name, ())) not in (0, rotary_dim // 2):
            raise ModelLoadError(f"{where}: {name} has {len(values[name])} entries, must have {rotary_dim // 2}")
    return RopeSpec(
        type=kind,
        theta=float(parameters["rope_theta"]),
        rotary_dim=rotary_dim,
        max_position_embeddings=config.max_position_embeddings,
        **values,
        **_mrope(parameters, mrope, rotary_dim, where),
    )


def _mrope(parameters: Mapping[str, Any], mrope: str | None, rotary_dim: int, where: str) -> dict[str, Any]:
    """The fields of a RopeSpec that say M-RoPE; none for a family without."""
    if mrope is None:
        return {}
    interleaved = mrope == "interleaved"
    if parameters.get("mrope_interleaved", interleaved) != interleaved:
        raise ModelLoadError(f"{where}: mrope_interleaved={not interleaved} is not supported here")
    sections = tuple(parameters.get("mrope_section") or ())
    try:
        Mrope(sections, interleaved).axes(rotary_dim)
    except ValueError as error:
        raise ModelLoadError(f"{where}: mrope_section: {error}") from error
    return {"mrope_sections": sections, "mrope_interleaved": interleaved}
