"""The language models inside image-text models: a text family under another name, with its weights one level deeper.

Owns: the families of every image-text checkpoint but Gemma 3's (which has a file of its own).
Must not know: image encoders; their tensors are `other_parts`, loaded by izh/multimodal/vlm.
Prefixes are those of current checkpoints and of older ones; the first that fits is taken off.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from izh.errors import ModelLoadError
from izh.model.families import llama, mistral, qwen2, qwen3
from izh.model.families.family import LLAMA_MODULES, Family, layers_of, rope_of
from izh.model.spec import ModelSpec

ToSpec = Callable[[Any, tuple[int, ...]], ModelSpec]

PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")

# The text models found inside models that leave the choice open. Their tables of weights are one.
_TEXT: dict[str, ToSpec] = {
    family.model_type: family.to_spec for family in (llama.LLAMA, mistral.MISTRAL, qwen2.QWEN2, qwen3.QWEN3)
}


def _text_part(to_spec: ToSpec) -> ToSpec:
    """The spec of a config's text part. Whether the head is tied the outer config decides, as in the reference."""

    def outer(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
        spec = to_spec(config.text_config, eos_token_ids)
        return replace(spec, model_type=config.model_type, tie_word_embeddings=config.tie_word_embeddings)

    return outer


def _any_text(text: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    if text.model_type not in _TEXT:
        raise ModelLoadError(
            f"text_config: model_type {text.model_type!r} is not supported here; supported: {', '.join(sorted(_TEXT))}"
        )
    return _TEXT[text.model_type](text, eos_token_ids)


def _qwen2_text(text: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    return qwen2.with_rope(text, eos_token_ids, rope_of(text, text.rope_parameters, mrope="in order"))


def _qwen3_text(config: Any, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """Qwen3-VL: its vision config says how many first layers take further rows of an image (deepstack)."""
    text = config.text_config
    layers = layers_of(text, ["full_attention"] * text.num_hidden_layers, None)
    rope = rope_of(text, text.rope_parameters, mrope="interleaved")
    num_deepstack = len(config.vision_config.deepstack_visual_indexes)
    if num_deepstack > text.num_hidden_layers:
        raise ModelLoadError(f"qwen3_vl config: {num_deepstack} deepstack levels for {text.num_hidden_layers} layers")
    return replace(
        qwen3.with_rope(text, eos_token_ids, layers, rope),
        model_type=config.model_type,
        tie_word_embeddings=config.tie_word_embeddings,
        num_deepstack=num_deepstack,
    )


def _family(model_type: str, to_spec: ToSpec, other_parts: tuple[str, ...], *prefixes: str) -> Family:
    return Family(
        model_type=model_type,
        to_spec=to_spec,
        modules=LLAMA_MODULES,
        prefixes=(*prefixes, *PREFIXES),
        other_parts=other_parts,
    )


QWEN2_VL = _family("qwen2_vl", _text_part(_qwen2_text), ("visual.",))
QWEN2_5_VL = _family("qwen2_5_vl", _text_part(_qwen2_text), ("visual.",))
QWEN3_VL = _family("qwen3_vl", _qwen3_text, ("visual.",))
LLAVA = _family("llava", _text_part(_any_text), ("vision_tower.", "multi_modal_projector."))
LLAVA_ONEVISION = _family(
    "llava_onevision", _text_part(_any_text), ("vision_tower.", "multi_modal_projector.", "image_newline")
)
SMOLVLM = _family("smolvlm", _text_part(_any_text), ("vision_model.", "connector."), "model.text_model.")
IDEFICS3 = _family("idefics3", _text_part(_any_text), ("vision_model.", "connector."), "model.text_model.")
INTERNVL = _family("internvl", _text_part(_any_text), ("vision_tower.", "multi_modal_projector."))

IMAGE_TEXT = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, LLAVA, LLAVA_ONEVISION, SMOLVLM, IDEFICS3, INTERNVL)
