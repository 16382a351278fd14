"""The face of a trained vision-language checkpoint in the process that encodes images.

Owns: VisionModel: images in, rows out, and the layout of prompts; the table of families.
Must not know: HTTP, caches, the engine. The engine gets what `Layout.prompt(rows).features()` gives.

    images --prepare--> ImageInputs --encode--> rows                    prepare and encode: once per image; rows can be
                            |                    |                      kept under `ImageInputs.digest`, and images of
    messages --lay_out--> Layout (T is known) --prompt--> VisionPrompt  several requests encoded in one call
"""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from izh.errors import ModelLoadError, RequestError
from izh.model.weights import Safetensors
from izh.multimodal.vlm.family import ImageInputs, VisionFamily
from izh.multimodal.vlm.gemma3 import Gemma3
from izh.multimodal.vlm.idefics3 import Idefics3, SmolVLM
from izh.multimodal.vlm.internvl import InternVL
from izh.multimodal.vlm.layout import ChatLayout, Layout
from izh.multimodal.vlm.llava import Llava, LlavaOnevision
from izh.multimodal.vlm.load import load_processor, load_tower
from izh.multimodal.vlm.qwen import Qwen2VL, Qwen3VL, Qwen25VL

FAMILIES: dict[str, type[VisionFamily]] = {
    family.model_type: family
    for family in (Qwen2VL, Qwen25VL, Qwen3VL, Llava, LlavaOnevision, Idefics3, SmolVLM, InternVL, Gemma3)
}


def is_vision_model(directory: Path) -> bool:
    """Whether the checkpoint is of a family that takes images."""
    return _model_type(directory) in FAMILIES


class VisionModel:
    """A checkpoint's tower, projector, image processor and chat template. Safe from any thread."""

    def __init__(self, family: VisionFamily) -> None:
        self.family = family
        self._lay_out = ChatLayout(family)

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype = torch.float32) -> "VisionModel":
        """Raises ModelLoadError for a checkpoint of another family, or one that cannot be read."""
        model_type = _model_type(directory)
        if model_type not in FAMILIES:
            raise ModelLoadError(
                f"{directory}: model_type {model_type!r} takes no images here; supported: {', '.join(sorted(FAMILIES))}"
            )
        family = FAMILIES[model_type]
        revision = Safetensors(directory).fingerprint() + str(dtype).encode()
        return cls(family(load_tower(directory, dtype), load_processor(directory, family.processor_class), revision))

    def prepare(self, images: Many[Image.Image]) -> list[ImageInputs]:
        """The images of one prompt, in order, upright and in mode RGB (see izh/multimodal/pixels.py).

        They are prepared together because some families treat several images otherwise than one.
        Raises RequestError for one that the checkpoint's image processor refuses.
        """
        try:
            return self.family.prepare(images)
        except ValueError as error:
            raise RequestError(f"the model's image processor refused the image: {error}", "image_url") from error

    @torch.inference_mode()
    def encode(self, images: Many[ImageInputs]) -> list[Tensor]:
        """Rows of each image, [num_rows, width] float32 on the CPU. The images may belong to different requests."""
        rows = self.family.encode(images) if images else []
        for image, own in zip(images, rows, strict=True):
            assert len(own) == image.num_rows, f"{len(own)} rows where the prompt has {image.num_rows} places"
        return [own.float().cpu() for own in rows]

    def lay_out(
        self,
        messages: Many[Mapping[str, Any]],
        images: Many[ImageInputs],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Many[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Layout:
        """Token ids of a conversation with a place for every row. See ChatLayout."""
        return self._lay_out(
            messages,
            images,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )


def _model_type(directory: Path) -> str | None:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as a model config: {error}") from error
    found = config.get("model_type") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None
