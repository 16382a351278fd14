"""The tiny vision-language checkpoints that several tests use: the Qwen-VL families and Gemma 3."""

from pathlib import Path
from typing import Any

import vision_oracle
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_oracle import Case

MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SIZES = {"depth": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
QWEN_VISION = {
    "qwen2_vl": _SIZES | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": _SIZES | _WIDTHS | {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": _SIZES | _WIDTHS | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
}
QWEN = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
QWEN_SECTIONS = {
    "qwen2_vl": {"mrope_section": [2, 3, 3]},
    "qwen2_5_vl": {"mrope_section": [4, 2, 2]},
    "qwen3_vl": {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
}

GEMMA3_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA3_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
    "vision_use_head": False,
}
GEMMA3_ROWS = 4


def qwen(name: str, folder: Path) -> Case:
    """Images of any size, M-RoPE; Qwen3-VL's rows are added to in its first layers."""
    config_class, model_class = QWEN[name]
    tokenizer = vision_oracle.tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *MEDIA)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MEDIA))
    text = vision_oracle.TEXT | {"vocab_size": len(tokenizer), "rope_parameters": _ROPE | QWEN_SECTIONS[name]}
    if name == "qwen3_vl":
        text["head_dim"] = 16
    config = config_class(
        vision_config=QWEN_VISION[name],
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
    return vision_oracle.make(folder, model_class, config, tokenizer, images, positions=rope_index)


def rope_index(model: Any, inputs: Any) -> Any:
    return model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )


def gemma3(folder: Path, **processing: Any) -> Case:
    """Rows of an image see each other both ways; the window of most layers is less than an image."""
    tokenizer = vision_oracle.tokenizer("<start_of_image>", **GEMMA3_NAMES)
    start, end, row = tokenizer.convert_tokens_to_ids(list(GEMMA3_NAMES.values()))
    config = Gemma3Config(
        vision_config=GEMMA3_VISION,
        text_config=vision_oracle.TEXT
        | {
            "vocab_size": len(tokenizer),
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 3,  # less than an image has rows
            "query_pre_attn_scalar": 20,
        },
        mm_tokens_per_image=GEMMA3_ROWS,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=row,
    )
    images = Gemma3ImageProcessorPil(size={"height": 24, "width": 24}, **processing)
    options = {"image_seq_length": GEMMA3_ROWS}
    return vision_oracle.make(folder, Gemma3ForConditionalGeneration, config, tokenizer, images, options)
