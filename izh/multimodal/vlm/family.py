"""What a family of vision-language models is, and what families share.

Owns: ImageInputs, one image as its tower takes it; VisionFamily, the part that differs from family to family.
Must not know: prompts beyond the text that stands for an image, requests, the engine.
Invariant: an image's rows depend on its ImageInputs and the tower's weights only, so a digest of both names them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from izh.cache.keys import digest
from izh.multimodal.prompt import Grid


@dataclass(frozen=True, eq=False, slots=True)
class ImageInputs:
    """One image, prepared.

    `tensors` are what the tower takes for it, on the CPU. `text` stands for it in a prompt: rows' places with what the
    family writes between and around them (boundaries, crops, line ends). `num_rows` is how many rows it becomes.
    `grid` says how they lie in time, height and width, for a model with three position axes. `digest` names the rows.
    """

    tensors: dict[str, Tensor]
    text: str
    num_rows: int
    grid: Grid | None
    digest: bytes

    @property
    def laid_out(self) -> "ImageInputs":
        """See izh.multimodal.seam.Prepared."""
        return replace(self, tensors={})


class VisionFamily(ABC):
    """A family's own rules, around its tower and processor."""

    model_type: ClassVar[str]
    processor_class: ClassVar[str]

    def __init__(self, model: Any, processor: Any, revision: bytes) -> None:
        """`revision` names the tower's weights and config."""
        self.model = model
        self.processor = processor
        self._revision = revision
        self.row_token_id: int = model.config.image_token_id  # reserves a row's place
        self.row_token: str = processor.tokenizer.convert_ids_to_tokens(self.row_token_id)

    @property
    def sections(self) -> tuple[int, int, int] | None:
        """The decoder's M-RoPE sections; None when it has one position axis."""
        return None

    @abstractmethod
    def prepare(self, images: Many[Image.Image]) -> list[ImageInputs]:
        """The images (RGB) of one prompt, in order. Raises ValueError for one that the processor refuses."""

    @abstractmethod
    def encode(self, images: Many[ImageInputs]) -> list[Tensor]:
        """Rows of each image, [num_rows, width]. The images may belong to different prompts."""

    # -- for the families ---------------------------------------------------------------------------------------------

    def process(self, images: Any) -> Any:
        """What the checkpoint's image processor makes of these images."""
        own = getattr(self.processor, "images_kwargs", {})  # what some processors' classes ask for on every call
        return self.processor.image_processor(images=images, **own, return_tensors="pt")

    def inputs(self, tensors: dict[str, Tensor], text: str, grid: Grid | None = None) -> ImageInputs:
        parts: list[bytes | str] = []
        for name, tensor in sorted(tensors.items()):
            parts += [name, str(tensor.dtype), repr(list(tensor.shape)), tensor.contiguous().numpy().tobytes()]
        identity = digest("image inputs", self._revision, *parts)
        return ImageInputs(tensors, text, text.count(self.row_token), grid, identity)


class TiledFamily(VisionFamily):
    """A family whose tower takes tiles of one size, and nothing else about an image."""

    def prepare(self, images: Many[Image.Image]) -> list[ImageInputs]:
        processed = [self.process([image]) for image in images]
        return [
            self.inputs({"pixel_values": each["pixel_values"]}, self.processor.replace_image_token(each, 0))
            for each in processed
        ]

    def encode(self, images: Many[ImageInputs]) -> list[Tensor]:
        features = self.model.get_image_features(concatenated(images, "pixel_values"), return_dict=True)
        return split_rows(features.pooler_output, images)


def concatenated(images: Many[ImageInputs], name: str) -> Tensor:
    """One tensor of all images, along the first axis."""
    return torch.cat([image.tensors[name] for image in images])


def split_rows(rows: Any, images: Many[ImageInputs]) -> list[Tensor]:
    """Rows of all images in a row (a tensor [..., width], or a sequence of such) dealt out to them."""
    flat = rows if isinstance(rows, Tensor) else torch.cat([part.flatten(0, -2) for part in rows])
    return list(flat.flatten(0, -2).split([image.num_rows for image in images]))
