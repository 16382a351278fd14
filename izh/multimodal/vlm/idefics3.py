"""Idefics3 and SmolVLM: an image is cut into tiles, each with a line saying which it is, and a small whole at the end.

SmolVLM's own processor class also does videos and cannot be made without a library that spells numbers; its images are
written exactly as Idefics3 writes them, so Idefics3's class does both.
"""

from collections import defaultdict
from collections.abc import Sequence as Many
from typing import Any

from PIL import Image
from torch import Tensor

from izh.multimodal.vlm.family import ImageInputs, VisionFamily, concatenated, split_rows


class Idefics3(VisionFamily):
    model_type = "idefics3"
    processor_class = "Idefics3Processor"

    def prepare(self, images: Many[Image.Image]) -> list[ImageInputs]:
        return [self._prepared(self.process([[image]])) for image in images]

    def _prepared(self, processed: Any) -> ImageInputs:
        names = ("pixel_values", "pixel_attention_mask")
        return self.inputs(
            {name: processed[name][0] for name in names},  # the tiles
            self.processor.replace_image_token(processed, 0),
        )

    def encode(self, images: Many[ImageInputs]) -> list[Tensor]:
        by_size: dict[Any, list[int]] = defaultdict(list)
        for index, image in enumerate(images):
            by_size[image.tensors["pixel_values"].shape[1:]].append(index)
        rows: dict[int, Tensor] = {}
        for chosen in by_size.values():
            group = [images[index] for index in chosen]
            features = self.model.get_image_features(
                concatenated(group, "pixel_values")[None],
                concatenated(group, "pixel_attention_mask")[None],
                return_dict=True,
            )
            rows.update(zip(chosen, split_rows(features.pooler_output, group), strict=True))
        return [rows[index] for index in range(len(images))]


class SmolVLM(Idefics3):
    model_type = "smolvlm"
