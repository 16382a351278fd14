"""What a model that sees must be able to do, for whoever feeds it images.

Owns: MultimodalProcessor and the two things that it gives out. `izh/multimodal/vision_path.py` is one around a
VisionEncoder, `izh/multimodal/vlm/` has those of trained checkpoints.
Must not know: where images come from, caches, requests.

    images --prepare--> [Prepared] --encode--> rows        rows may be kept under Prepared.digest; images of several
                            |                    |         requests may be encoded in one call. Where the rows are
                            |                    |         known, Prepared.laid_out is enough for the rest
    messages ----------- lay_out --> Layout -- prompt --> VisionPrompt
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from izh.multimodal.prompt import VisionPrompt


class Prepared(Protocol):
    """One image as the encoder takes it."""

    @property
    def digest(self) -> bytes:
        """Names its rows: equal for two images only if their rows are. It names the encoder's weights too."""

    @property
    def laid_out(self) -> "Prepared":
        """The same without what only the encoder takes: enough for `lay_out`, and small."""


class Layout(Protocol):
    """A prompt whose images need not be encoded yet."""

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt, each image at its full length."""

    def prompt(self, rows: Many[Tensor]) -> VisionPrompt:
        """The prompt with the rows of its images, in order."""


class MultimodalProcessor(Protocol):
    """Safe from any thread."""

    def prepare(self, images: Many[Image.Image]) -> Many[Any]:
        """A Prepared of each image of one prompt, in order. The images are upright and in mode RGB. What one becomes
        depends on it, and on whether it is the only one, and on nothing else.

        Raises RequestError for one that the model cannot take.
        """

    def encode(self, images: Many[Any]) -> Many[Tensor]:
        """Rows [n, width] of each Prepared, on the CPU. They may belong to several prompts."""

    def lay_out(
        self,
        messages: Many[Mapping[str, Any]],
        images: Many[Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Many[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Layout:
        """A conversation as `Tokenizer.chat` takes it; its i-th part of type image or image_url is images[i].

        Raises RequestError when the chat template refuses it.
        """
