"""LLaVA: one square picture of fixed size, one row per patch.

LLaVA-OneVision: a prompt's only image is cut into tiles by its shape, packed without what was padding, and each line of
patches ends in a row of its own; of several images each is one tile. So the same pixels have other rows beside others.
"""

from collections.abc import Sequence as Many
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from izh.errors import ModelLoadError
from izh.multimodal.vlm.family import ImageInputs, TiledFamily, VisionFamily, concatenated


class Llava(TiledFamily):
    model_type = "llava"
    processor_class = "LlavaProcessor"

    def __init__(self, model: Any, processor: Any, revision: bytes) -> None:
        tower = model.config.vision_config.model_type
        if tower == "pixtral":
            raise ModelLoadError("llava config: vision_config of model_type 'pixtral' is not supported")
        if processor.patch_size is None:
            raise ModelLoadError(
                "llava: the processor's config lacks patch_size, which says how many rows an image has"
            )
        super().__init__(model, processor, revision)


class LlavaOnevision(VisionFamily):
    model_type = "llava_onevision"
    processor_class = "LlavaOnevisionProcessor"

    def prepare(self, images: Many[Image.Image]) -> list[ImageInputs]:
        if not images:
            return []
        processed = self.process([list(images)])
        counts = torch.tensor([len(images)])
        return [
            self.inputs(
                {
                    # Tiles; of several images only the first is more than padding.
                    "pixel_values": processed["pixel_values"][index][: None if len(images) == 1 else 1],
                    "image_sizes": processed["image_sizes"][index : index + 1],
                    "is_one_of_several": counts > 1,
                },
                self.processor.replace_image_token(processed, index),
            )
            for index in range(len(images))
        ]

    def encode(self, images: Many[ImageInputs]) -> list[Tensor]:
        rows: dict[int, Tensor] = {}
        for several in (False, True):
            chosen = [
                index for index, image in enumerate(images) if bool(image.tensors["is_one_of_several"]) == several
            ]
            for index, own in zip(chosen, self._encoded([images[index] for index in chosen], several), strict=True):
                rows[index] = own
        return [rows[index] for index in range(len(images))]

    def _encoded(self, images: list[ImageInputs], several: bool) -> list[Tensor]:
        if not images:
            return []
        # One left of several (the others were encoded before) would count as an only one: it goes twice.
        twice = images * 2 if several and len(images) == 1 else images
        features = self.model.get_image_features(
            concatenated(twice, "pixel_values"),
            image_sizes=concatenated(twice, "image_sizes"),
            batch_num_images=torch.tensor([len(twice)] if several else [1] * len(twice)),
            return_dict=True,
        )
        return list(features.pooler_output)[: len(images)]
