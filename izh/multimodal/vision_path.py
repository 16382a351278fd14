"""A VisionEncoder as eyes of a text model: its MultimodalProcessor.

Owns: VisionPath: which token reserves an image's places, how rotary positions are dealt out, what names its rows; its
directory on disk (that of its encoder, and path.json).
Must not know: where images come from, caches, requests.
Invariant: an image's place in a prompt comes from an image part and nowhere else; the token that reserves it is text
when somebody types it, and nothing special even when a template writes it.
"""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from izh.cache.keys import digest
from izh.errors import ModelLoadError
from izh.multimodal.encoder import VisionEncoder
from izh.multimodal.processor import PreparedImage, VisionProcessor
from izh.multimodal.prompt import Grid, VisionPrompt, expand_images
from izh.text.tokenizer import Tokenizer

PATH_FILE = "path.json"
_PLACE = -1  # stands for an image until it is expanded: no token has this id


@dataclass(frozen=True, eq=False, slots=True)
class PathLayout:
    """A conversation with `_PLACE` for each image (see izh.multimodal.seam.Layout)."""

    ids: list[int]
    placeholder_id: int
    grid: Grid
    sections: tuple[int, int, int]

    @property
    def token_ids(self) -> list[int]:
        num_rows = self.grid[0] * self.grid[1] * self.grid[2]
        return [
            token for each in self.ids for token in ([self.placeholder_id] * num_rows if each == _PLACE else (each,))
        ]

    def prompt(self, rows: Many[Tensor]) -> VisionPrompt:
        expanded = expand_images(self.ids, _PLACE, rows, [self.grid] * len(rows), self.sections)
        return replace(expanded, token_ids=self.token_ids)


class VisionPath:
    """Images through `encoder` into a decoder whose tokenizer this is (see izh.multimodal.seam.MultimodalProcessor).

    `placeholder_id` is the token that reserves an image's places, `sections` how many frequency pairs turn with time,
    height and width. The encoder's weights may not change any more: its rows are known by them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: VisionEncoder,
        placeholder_id: int,
        sections: tuple[int, int, int],
        processor: VisionProcessor | None = None,
    ) -> None:
        self.processor = processor or VisionProcessor(encoder.config)
        if self.processor.image_size != encoder.config.image_size:
            raise ValueError(
                f"the processor makes images of {self.processor.image_size} pixels, the encoder takes "
                f"{encoder.config.image_size}"
            )
        if not 0 <= placeholder_id < tokenizer.vocab_size:
            raise ValueError(f"placeholder_id must be within 0..{tokenizer.vocab_size - 1}, got {placeholder_id}")
        self.encoder = encoder.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._placeholder_id = placeholder_id
        self.sections = sections
        self._revision = encoder.revision()

    def save(self, directory: str | Path) -> None:
        """Write the encoder, and path.json, which says the rest, into `directory`, which is made if missing."""
        self.encoder.save(directory)
        fields = {
            "placeholder": self._tokenizer.piece(self._placeholder_id)[0],
            "sections": list(self.sections),
            "pixels": self.processor.recipe,
        }
        (Path(directory) / PATH_FILE).write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(
        cls, directory: str | Path, tokenizer: Tokenizer, processor: VisionProcessor | None = None
    ) -> "VisionPath":
        """What `save` wrote, for the decoder whose tokenizer this is. Raises ModelLoadError naming the file."""
        file = Path(directory) / PATH_FILE
        try:
            fields: Any = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{file}: {error}") from error
        if not isinstance(fields, dict) or fields.keys() != {"placeholder", "sections", "pixels"}:
            raise ModelLoadError(f"{file}: must be an object with placeholder, sections and pixels, and no more")
        encoder = VisionEncoder.load(directory)
        path = cls(tokenizer, encoder, _token(fields, tokenizer, file), _sections(fields, file), processor)
        if fields["pixels"] != path.processor.recipe:
            raise ModelLoadError(
                f"{file}: pixels are {fields['pixels']!r}, but images are prepared as {path.processor.recipe!r}; "
                f"train for these"
            )
        return path

    def prepare(self, images: Many[Image.Image]) -> list[PreparedImage]:
        prepared = (self.processor.prepare(image) for image in images)
        return [replace(each, digest=digest("encoded image", each.digest, self._revision)) for each in prepared]

    @torch.inference_mode()
    def encode(self, images: Many[PreparedImage]) -> list[Tensor]:
        if not images:
            return []
        weight = self.encoder.positions
        pixels = torch.stack([image.pixels for image in images]).to(weight.device, weight.dtype)
        return list(self.encoder(pixels).float().cpu())

    def lay_out(
        self,
        messages: Many[Mapping[str, Any]],
        images: Many[PreparedImage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Many[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> PathLayout:
        ids = self._tokenizer.chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
            image_id=_PLACE,
        )
        return PathLayout(ids, self._placeholder_id, self.encoder.config.grid, self.sections)


def _token(fields: Mapping[str, Any], tokenizer: Tokenizer, file: Path) -> int:
    """The placeholder's id."""
    text = fields["placeholder"]
    ids = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else []
    if len(ids) != 1:
        raise ModelLoadError(f"{file}: placeholder must be one token of this model, {text!r} is {len(ids)}")
    return ids[0]


def _sections(fields: Mapping[str, Any], file: Path) -> tuple[int, int, int]:
    counts = fields["sections"]
    if isinstance(counts, list) and len(counts) == 3 and all(type(count) is int and count >= 0 for count in counts):
        return counts[0], counts[1], counts[2]
    raise ModelLoadError(f"{file}: sections must be three counts of frequency pairs, got {counts!r}")
