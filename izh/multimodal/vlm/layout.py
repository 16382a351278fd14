"""A conversation with images becomes token ids, with a place for every row.

Owns: ChatLayout (the checkpoint's own chat template, the images' texts put in, what users typed kept apart) and Layout.
Must not know: pixels, towers.
Invariant: a place for a row comes from an image part and nowhere else: a placeholder that somebody types is text.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from izh.errors import RequestError
from izh.multimodal.prompt import VisionPrompt, expand_images
from izh.multimodal.vlm.family import ImageInputs, VisionFamily
from izh.text.guard import Guard
from izh.text.messages import IMAGE_TYPES, template_messages


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """A prompt of T tokens whose images are not encoded yet: its length is known, its rows are not.

    `places[i]` are the positions of image i's rows, ascending. `sections` as in VisionPrompt.
    """

    token_ids: list[int]
    images: tuple[ImageInputs, ...]
    places: tuple[tuple[int, ...], ...]
    sections: tuple[int, int, int] | None

    def prompt(self, rows: Many[Tensor]) -> VisionPrompt:
        """The whole prompt. rows[i] [images[i].num_rows, width]."""
        if self.sections is None:
            image_rows = {
                place: row
                for places, own in zip(self.places, rows, strict=True)
                for place, row in zip(places, own, strict=True)
            }
            positions = torch.arange(len(self.token_ids)).expand(3, -1)
            return VisionPrompt(self.token_ids, image_rows, positions, 0, None)
        # With three axes an image's rows lie side by side: one placeholder stands for all.
        inner = {place for places in self.places for place in places[1:]}
        ids = [token for place, token in enumerate(self.token_ids) if place not in inner]
        grids = [image.grid for image in self.images if image.grid is not None]
        placeholder = self.token_ids[self.places[0][0]] if self.places else -1
        return expand_images(ids, placeholder, rows, grids, self.sections)


class ChatLayout:
    """Lays out conversations by a family's template and tokenizer. Safe from any thread."""

    def __init__(self, family: VisionFamily) -> None:
        self._family = family
        self._placeholder: str = family.processor.image_token  # what the template writes for an image
        self._guard = Guard(family.processor.tokenizer.backend_tokenizer)

    def __call__(
        self,
        messages: Many[Mapping[str, Any]],
        images: Many[ImageInputs],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Many[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Layout:
        """`messages` as in the OpenAI API; the i-th part of type image or image_url is images[i].

        Raises RequestError when the template refuses the messages, or does not write each image part once.
        """
        hidden: list[str] = []
        try:
            text = self._family.processor.apply_chat_template(
                self._guard.hide(_with_parts(messages), hidden),
                tools=self._guard.hide(list(tools), hidden) if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **self._guard.hide(dict(template_kwargs or {}), hidden),
            )
        except RequestError:
            raise
        except Exception as error:  # the template is a program of the checkpoint: what it raises is about the messages
            raise RequestError(f"the model's chat template refused the messages: {error}", "messages") from error
        pieces = text.split(self._placeholder)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                f"the model's chat template wrote {len(pieces) - 1} images for {len(images)} image parts", "messages"
            )
        whole = pieces[0] + "".join(image.text + piece for image, piece in zip(images, pieces[1:], strict=True))
        try:
            return self._places(self._opening(whole) + self._guard.encode(whole, hidden), images)
        except TypeError as error:  # the library's word for a lone surrogate
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def _opening(self, text: str) -> list[int]:
        """What the tokenizer puts before any text, unless the template wrote it: so do the reference's processors."""
        tokenizer = self._family.processor.tokenizer
        if tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token):
            return []
        opening: list[int] = tokenizer.backend_tokenizer.encode("", add_special_tokens=True).ids
        return opening

    def _places(self, ids: list[int], images: Many[ImageInputs]) -> Layout:
        row_token = self._family.row_token_id
        every = [place for place, token in enumerate(ids) if token == row_token]
        if len(every) != sum(image.num_rows for image in images):
            raise RequestError(
                f"the prompt has {len(every)} places for {sum(image.num_rows for image in images)} rows of images",
                "messages",
            )
        places, first = [], 0
        for image in images:
            places.append(tuple(every[first : first + image.num_rows]))
            first += image.num_rows
        return Layout(ids, tuple(images), tuple(places), self._family.sections)


def _with_parts(messages: Many[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as image-text templates expect them: contents as lists of parts."""
    out = template_messages([{**message, "content": ""} for message in messages])
    for index, (new, message) in enumerate(zip(out, messages, strict=True)):
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else (content or [])
        new["content"] = [_part(f"messages[{index}].content[{place}]", part) for place, part in enumerate(parts)]
    return out


def _part(param: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGE_TYPES:
        return {"type": "image"}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise RequestError(f"{param} must be a text or an image, got type {kind!r}", param)
