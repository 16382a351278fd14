"""Qwen3: Llama with a norm on each query and key head, and a head width of its own."""

from typing import Any

from izh.model.families.family import LLAMA_MODULES, Family, common_fields, layers_of, rope_of
from izh.model.spec import LayerSpec, ModelSpec, RopeSpec


def to_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    layers = layers_of(config, config.layer_types, config.sliding_window)
    return with_rope(config, eos_token_ids, layers, rope_of(config, config.rope_parameters))


def with_rope(config: Any, eos_token_ids: tuple[int, ...], layers: tuple[LayerSpec, ...], rope: RopeSpec) -> ModelSpec:
    """A Qwen3 whose positions turn by `rope`."""
    return ModelSpec(
        **common_fields(config, config.hidden_act),
        layers=layers,
        ropes=(rope,),
        eos_token_ids=eos_token_ids,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm=True,
    )


QWEN3 = Family(model_type="qwen3", to_spec=to_spec, modules=LLAMA_MODULES)
