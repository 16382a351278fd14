"""LLaVA and LLaVA-OneVision through our engine, against transformers' own models."""

import pytest
import torch
import vision_oracle
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from izh.errors import ModelLoadError
from izh.multimodal.vlm.llava import Llava

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
}
PINPOINTS = [[24, 48], [48, 24], [48, 48], [24, 72], [72, 24]]


def llava(folder):
    """A CLIP tower in front of a Llama."""
    tokenizer = vision_oracle.tokenizer("<image>\n", "<image>")
    config = LlavaConfig(
        vision_config=VISION | {"model_type": "clip_vision_model"},
        text_config=vision_oracle.TEXT | {"vocab_size": len(tokenizer), "model_type": "llama"},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    images = LlavaImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    options = {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return vision_oracle.make(folder, LlavaForConditionalGeneration, config, tokenizer, images, options)


def llava_onevision(folder):
    """A SigLIP tower in front of a Qwen2 with a tied head."""
    tokenizer = vision_oracle.tokenizer("<image>", "<image>", "<video>")
    config = LlavaOnevisionConfig(
        vision_config=VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        text_config=vision_oracle.TEXT | {"vocab_size": len(tokenizer), "model_type": "qwen2"},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=True,
    )
    images = LlavaOnevisionImageProcessorPil(size={"height": 24, "width": 24}, image_grid_pinpoints=PINPOINTS)
    options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    return vision_oracle.make(folder, LlavaOnevisionForConditionalGeneration, config, tokenizer, images, options)


@pytest.fixture(scope="module", params=[llava, llava_onevision])
def case(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


def rows(model, inputs):
    names = ("pixel_values", "image_sizes", "batch_num_images")
    features = model.get_image_features(**{name: inputs[name] for name in names if name in inputs}, return_dict=True)
    return torch.cat(list(features.pooler_output))


@pytest.mark.parametrize("name", vision_oracle.CONVERSATIONS)
def test_a_conversation_equals_the_official_model(case, name):
    prompt = case.check(vision_oracle.CONVERSATIONS[name], rows)
    assert prompt.sections is None


def test_images_of_several_requests_are_encoded_in_one_call(case):
    groups = [
        [vision_oracle.picture(40, 40)],
        [vision_oracle.picture(90, 24), vision_oracle.picture(20, 61)],
        [vision_oracle.picture(24, 96)],
    ]
    prepared = [case.vision.prepare(group) for group in groups]
    alone = [row for group in prepared for row in case.vision.encode(group)]
    together = case.vision.encode([image for group in prepared for image in group])
    for one, other in zip(alone, together, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < vision_oracle.ROWS_BOUND


def test_one_left_of_several_images_is_still_one_of_several(case):
    prepared = case.vision.prepare([vision_oracle.picture(90, 24), vision_oracle.picture(20, 61)])
    both = case.vision.encode(prepared)
    for image, expected in zip(prepared, both, strict=True):
        (own,) = case.vision.encode([image])
        assert own.shape == expected.shape
        assert (own - expected).abs().max() < vision_oracle.ROWS_BOUND


def test_one_image_has_more_rows_alone_than_beside_another(tmp_path):
    case = llava_onevision(tmp_path)
    image = vision_oracle.picture(90, 24)
    (alone,) = case.vision.prepare([image])
    beside, _ = case.vision.prepare([image, image])
    assert beside.num_rows == 17
    assert alone.num_rows > 17
    assert alone.digest != beside.digest


def test_what_llava_can_also_be_is_refused_by_name(tmp_path):
    case = llava(tmp_path)
    family = case.vision.family
    family.model.config.vision_config.model_type = "pixtral"
    with pytest.raises(ModelLoadError, match="'pixtral' is not supported"):
        Llava(family.model, family.processor, b"")
    family.model.config.vision_config.model_type = "clip_vision_model"
    family.processor.patch_size = None
    with pytest.raises(ModelLoadError, match="lacks patch_size"):
        Llava(family.model, family.processor, b"")
