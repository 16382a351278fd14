"""Llama and what is built like it: SmolLM and SmolLM2, TinyLlama, Yi, DeepSeek-LLM and others."""

from typing import Any

from izh.model.families.family import LLAMA_MODULES, Family, common_fields, layers_of, rope_of
from izh.model.spec import ModelSpec


def to_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    return ModelSpec(
        **common_fields(config, config.hidden_act),
        layers=layers_of(config, ["full_attention"] * config.num_hidden_layers, None),
        ropes=(rope_of(config, config.rope_parameters),),
        eos_token_ids=eos_token_ids,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


LLAMA = Family(model_type="llama", to_spec=to_spec, modules=LLAMA_MODULES)
