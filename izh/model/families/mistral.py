"""Mistral: Llama with one sliding window for all layers, and no biases."""

from typing import Any

from izh.model.families.family import LLAMA_MODULES, Family, common_fields, layers_of, rope_of
from izh.model.spec import ModelSpec


def to_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return ModelSpec(
        **common_fields(config, config.hidden_act),
        layers=layers_of(config, [kind] * config.num_hidden_layers, config.sliding_window),
        ropes=(rope_of(config, config.rope_parameters),),
        eos_token_ids=eos_token_ids,
    )


MISTRAL = Family(model_type="mistral", to_spec=to_spec, modules=LLAMA_MODULES)
