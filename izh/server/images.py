"""Conversations with images become prompts.

Owns: Images: what a request may hold, and its way through sources, intake and the model's own layout.
Must not know: bodies beyond their messages, answers, how any model sees.
Invariant: an image part is read or refused, never left out.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from izh.config import ServerOptions
from izh.errors import ContextLengthError, OptionError, RequestError
from izh.multimodal.decode import PIXELS_BOUND
from izh.multimodal.encoder_cache import CacheCounts, EncoderCache
from izh.multimodal.intake import ImageIntake
from izh.multimodal.seam import MultimodalProcessor
from izh.server.image_sources import ImageSources


class Images:
    """A model's eyes, as a server has them."""

    def __init__(self, processor: MultimodalProcessor, options: ServerOptions) -> None:
        """Raises OptionError for a limit, host or directory that cannot be."""
        if options.max_images < 1:
            raise OptionError(f"--max-images must be at least 1, got {options.max_images}")
        if options.image_cache_mb < 0:
            raise OptionError(f"--image-cache-mb must be at least 0, got {options.image_cache_mb:g}")
        if options.max_image_mb <= 0:
            raise OptionError(f"--max-image-mb must be above 0, got {options.max_image_mb:g}")
        if not 1 <= options.max_image_pixels <= PIXELS_BOUND:
            raise OptionError(
                f"--max-image-pixels must be within 1..{PIXELS_BOUND} (the decoder's own bound), got "
                f"{options.max_image_pixels}"
            )
        self._max_images = options.max_images
        self.processor = processor
        max_bytes = int(options.max_image_mb * 2**20)
        self._sources = ImageSources(options.allow_image_hosts, options.image_root, max_bytes=max_bytes)
        cache = EncoderCache(int(options.image_cache_mb * 2**20))
        self._intake = ImageIntake(processor, cache, max_pixels=options.max_image_pixels)

    async def prompt(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, **template: Any
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Token ids of a conversation, and the features of its images, if it has any; both must leave room for an
        answer within `max_tokens`. `template` goes to `Tokenizer.chat`.

        Raises RequestError naming the part at fault; ContextLengthError before anything is encoded.
        """
        parts = list(_image_parts(messages))
        if not parts:  # also through the model's own layout: its template may know no other form of content
            layout = await asyncio.to_thread(self.processor.lay_out, messages, (), **template)
            return layout.token_ids, None
        if len(parts) > self._max_images:
            param = parts[self._max_images][0]
            raise RequestError(
                f"{param}: a request may have at most {self._max_images} images, this one has {len(parts)}", param
            )
        data = await asyncio.gather(*(self._sources.read(part["image_url"]["url"], param) for param, part in parts))
        images = await self._intake.prepare(data)
        prepared = [each.prepared for each in images]
        layout = await asyncio.to_thread(self.processor.lay_out, _without_data(messages), prepared, **template)
        num_tokens = len(layout.token_ids)
        if num_tokens >= max_tokens:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, those of {len(parts)} images included, and with at least 1 token "
                f"of answer exceeds the context of {max_tokens} tokens; send fewer or smaller images, or less text",
                "messages",
            )
        rows = await self._intake.encode(images)
        prompt = await asyncio.to_thread(layout.prompt, rows)
        return prompt.token_ids, prompt.features()

    @property
    def counts(self) -> CacheCounts:
        """Of the cache of encoded images."""
        return self._intake.counts

    def close(self) -> None:
        """End the threads that read images."""
        self._intake.close()


def _image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each image part, in order, with the name of the field that holds its image."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.get("content") or ()):
            if part["type"] == "image_url":
                yield f"messages[{i}].content[{j}].image_url", part


def _without_data(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a chat template, which has no use for megabytes of image."""
    return [
        {
            **message,
            "content": [
                {"type": "image_url"} if part["type"] == "image_url" else part for part in message.get("content") or ()
            ]
            or None,
        }
        for message in messages
    ]
