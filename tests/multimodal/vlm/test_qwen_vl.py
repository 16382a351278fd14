"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL through our engine, against transformers' own models."""

import pytest
import torch
import vision_oracle
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SIZES = {"depth": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
VISION = {
    "qwen2_vl": SIZES | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": SIZES | WIDTHS | {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": SIZES | WIDTHS | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
}
MODELS = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SECTIONS = {
    "qwen2_vl": {"mrope_section": [2, 3, 3]},
    "qwen2_5_vl": {"mrope_section": [4, 2, 2]},
    "qwen3_vl": {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    name = request.param
    config_class, model_class = MODELS[name]
    tokenizer = vision_oracle.tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *MEDIA)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MEDIA))
    text = vision_oracle.TEXT | {"vocab_size": len(tokenizer), "rope_parameters": ROPE | SECTIONS[name]}
    if name == "qwen3_vl":
        text["head_dim"] = 16
    config = config_class(
        vision_config=VISION[name],
        text_config=text,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=name == "qwen2_vl",
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=1600
    )
    return vision_oracle.make(
        tmp_path_factory.mktemp(name), model_class, config, tokenizer, images, positions=rope_index
    )


def rope_index(model, inputs):
    return model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )


def rows(model, inputs):
    features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    levels = [features.pooler_output, *getattr(features, "deepstack_features", [])]
    return torch.cat([torch.cat(list(level)) for level in levels], dim=1)


@pytest.mark.parametrize("name", vision_oracle.CONVERSATIONS)
def test_a_conversation_equals_the_official_model(case, name):
    case.check(vision_oracle.CONVERSATIONS[name], rows)
