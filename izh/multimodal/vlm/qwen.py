"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size, one row per square of merged patches, M-RoPE.

Qwen3-VL's rows go on with those that its first decoder layers add (deepstack; see `izh.batch.Overrides`).
"""

from collections.abc import Sequence as Many
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from izh.multimodal.vlm.family import ImageInputs, VisionFamily, concatenated, split_rows


class Qwen2VL(VisionFamily):
    model_type = "qwen2_vl"
    processor_class = "Qwen2VLProcessor"

    @property
    def sections(self) -> tuple[int, int, int]:
        time, height, width = self.model.config.get_text_config().rope_parameters["mrope_section"]
        return time, height, width

    def prepare(self, images: Many[Image.Image]) -> list[ImageInputs]:
        return [self._prepared(self.process([image])) for image in images]

    def _prepared(self, processed: Any) -> ImageInputs:
        time, height, width = processed["image_grid_thw"][0].tolist()
        merge = self.processor.image_processor.merge_size
        return self.inputs(
            {name: processed[name] for name in ("pixel_values", "image_grid_thw")},
            self.processor.replace_image_token(processed, 0),
            (time, height // merge, width // merge),
        )

    def encode(self, images: Many[ImageInputs]) -> list[Tensor]:
        return split_rows(self.rows(self._features(images)), images)

    def _features(self, images: Many[ImageInputs]) -> Any:
        return self.model.get_image_features(
            concatenated(images, "pixel_values"), concatenated(images, "image_grid_thw"), return_dict=True
        )

    def rows(self, features: Any) -> Tensor:
        """All images' rows, [R, width]."""
        return torch.cat(list(features.pooler_output))


class Qwen25VL(Qwen2VL):
    model_type = "qwen2_5_vl"
    processor_class = "Qwen2_5_VLProcessor"


class Qwen3VL(Qwen2VL):
    model_type = "qwen3_vl"
    processor_class = "Qwen3VLProcessor"

    def rows(self, features: Any) -> Tensor:
        levels = [features.pooler_output, *features.deepstack_features]
        return torch.cat([torch.cat(list(level)) for level in levels], dim=1)
