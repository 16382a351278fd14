"""Gemma 3: sliding and full layers with a rotary recipe each, norms before and after both halves of a layer.

Covers `gemma3_text` and the text part of `gemma3`, whose image tensors are left to the image encoder.
"""

from dataclasses import replace
from typing import Any

from izh.model.families.family import LLAMA_MODULES, Family, common_fields, layers_of, refuse, rope_of
from izh.model.spec import ModelSpec

_RECIPES = ("full_attention", "sliding_attention")  # order of ModelSpec.ropes: global, local

MODULES = {
    **LLAMA_MODULES,
    "layers.{i}.post_attention_layernorm": ("layers.{i}.post_attention_norm", None),
    "layers.{i}.pre_feedforward_layernorm": ("layers.{i}.mlp_norm", None),
    "layers.{i}.post_feedforward_layernorm": ("layers.{i}.post_mlp_norm", None),
}


def text_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    refuse(config, use_bidirectional_attention=(False,), attn_logit_softcapping=())
    layers = layers_of(config, config.layer_types, config.sliding_window)
    used = [kind for kind in _RECIPES if kind in config.layer_types]
    fields = common_fields(config, config.hidden_activation)
    fields["attention_scale"] = config.query_pre_attn_scalar**-0.5
    return ModelSpec(
        **fields,
        layers=tuple(
            replace(layer, rope=used.index(kind)) for layer, kind in zip(layers, config.layer_types, strict=True)
        ),
        ropes=tuple(rope_of(config, config.rope_parameters[kind]) for kind in used),
        eos_token_ids=eos_token_ids,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embed_scale=config.hidden_size**0.5,
        logits_softcap=config.final_logit_softcapping,
    )


def image_text_spec(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    return replace(
        text_spec(config.text_config, eos_token_ids),
        tie_word_embeddings=config.tie_word_embeddings,  # the outer value decides, as in the reference
        images_both_ways=True,
    )


GEMMA3_TEXT = Family(model_type="gemma3_text", to_spec=text_spec, modules=MODULES)
GEMMA3 = Family(
    model_type="gemma3",
    to_spec=image_text_spec,
    modules=MODULES,
    prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
    other_parts=("vision_tower.", "multi_modal_projector."),
)
