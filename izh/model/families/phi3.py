"""Phi-3, Phi-3.5, Phi-4 (mini): Llama with fused projections in the checkpoint, longrope and partial rotary width."""

from typing import Any

from izh.model.families.family import LLAMA_MODULES, Family, common_fields, layers_of, rope_of
from izh.model.spec import ModelSpec


def to_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return ModelSpec(
        **common_fields(config, config.hidden_act),
        layers=layers_of(config, [kind] * config.num_hidden_layers, config.sliding_window),
        ropes=(rope_of(config, config.rope_parameters, partial=True),),
        eos_token_ids=eos_token_ids,
    )


MODULES = {
    name: place for name, place in LLAMA_MODULES.items() if place[1] is None and not name.endswith(("q_norm", "k_norm"))
} | {
    "layers.{i}.self_attn.qkv_proj": ("layers.{i}.attention.qkv_proj", None),
    "layers.{i}.mlp.gate_up_proj": ("layers.{i}.mlp.gate_up_proj", None),
}

PHI3 = Family(model_type="phi3", to_spec=to_spec, modules=MODULES)
