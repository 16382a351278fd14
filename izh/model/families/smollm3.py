"""SmolLM3: Llama in which some layers have no rotary positions."""

from dataclasses import replace
from typing import Any

from izh.model.families.family import LLAMA_MODULES, Family, common_fields, layers_of, rope_of
from izh.model.spec import ModelSpec


def to_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    # As in the reference, layer_types alone switch no window on.
    window = config.sliding_window if config.use_sliding_window else None
    layer_types = config.layer_types if window is not None else ["full_attention"] * config.num_hidden_layers
    layers = layers_of(config, layer_types, window)
    return ModelSpec(
        **common_fields(config, config.hidden_act),
        layers=tuple(
            replace(layer, rope=0 if has_rope else None)
            for layer, has_rope in zip(layers, config.no_rope_layers[: len(layers)], strict=True)
        ),
        ropes=(rope_of(config, config.rope_parameters),),
        eos_token_ids=eos_token_ids,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


SMOLLM3 = Family(model_type="smollm3", to_spec=to_spec, modules=LLAMA_MODULES)
