"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; upper layers may have a sliding window."""

from typing import Any

from izh.model.families.family import LLAMA_MODULES, Family, common_fields, layers_of, rope_of
from izh.model.spec import ModelSpec, RopeSpec


def to_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    return with_rope(config, eos_token_ids, rope_of(config, config.rope_parameters))


def with_rope(config: Any, eos_token_ids: tuple[int, ...], rope: RopeSpec) -> ModelSpec:
    """A Qwen2 whose positions turn by `rope`."""
    return ModelSpec(
        **common_fields(config, config.hidden_act),
        layers=layers_of(config, config.layer_types, config.sliding_window),
        ropes=(rope,),
        eos_token_ids=eos_token_ids,
        qkv_bias=True,
    )


QWEN2 = Family(model_type="qwen2", to_spec=to_spec, modules=LLAMA_MODULES)
