"""An image becomes the pixels that a VisionEncoder takes.

Owns: VisionProcessor: how pixels are prepared, and what names them.
Must not know: requests, prompts, the encoder's weights. What may be sent is decided in `izh/multimodal/decode.py`.
Invariant: equal digests mean equal pixels.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from izh.cache.keys import digest
from izh.multimodal.decode import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, decode_image, read_data_uri
from izh.multimodal.encoder import VisionConfig


@dataclass(frozen=True, eq=False, slots=True)
class PreparedImage:
    """What an encoder takes: `pixels` [3, S, S] float32 in [-1, 1] on the CPU, detached; `digest` names the decoded
    image together with how it was prepared; `width` and `height` are the image's own."""

    pixels: Tensor
    digest: bytes
    width: int
    height: int

    @property
    def laid_out(self) -> "PreparedImage":
        """See izh.multimodal.seam.Prepared."""
        return replace(self, pixels=torch.empty(0))


class VisionProcessor:
    """Prepares images for a fixed-resolution encoder: RGB, stretched to a square, normalized. Safe from any thread.

    Accepted: PNG, JPEG, WebP, GIF and BMP of one frame, as base64 data URIs with a correct media type.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        max_image_bytes: int = MAX_IMAGE_BYTES,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
    ) -> None:
        self.image_size = config.image_size
        self.max_image_bytes = max_image_bytes
        self.max_image_pixels = max_image_pixels
        self.recipe = f"rgb on white, bicubic to {self.image_size}x{self.image_size}, -1..1"

    def __call__(self, uri: str, param: str = "image_url") -> PreparedImage:
        """Decode and prepare one image. Raises RequestError naming `param` for anything that is not accepted."""
        media_type, data = read_data_uri(uri, param, self.max_image_bytes)
        return self.prepare(*decode_image(data, media_type, param, self.max_image_pixels))

    def prepare(self, rgb: Image.Image, mode: str = "RGB") -> PreparedImage:
        """Prepare an upright image of mode RGB; `mode` is the one that its file had."""
        name = digest("image", self.recipe, mode, rgb.width, rgb.height, rgb.tobytes())
        small = rgb.resize((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(small, np.float32)).permute(2, 0, 1).contiguous() / 127.5 - 1.0
        return PreparedImage(pixels, name, rgb.width, rgb.height)
