"""A base64 data URI becomes the pixels of one image.

Owns: VisionProcessor: what is accepted, what it may cost, and how pixels are prepared for a VisionEncoder.
Must not know: requests, prompts, the encoder's weights. It reads no file and fetches nothing.
Invariant: any string gives either an image's right pixels or a RequestError; bytes and pixels are bounded before they
are decoded.
"""

import base64
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from izh.cache.keys import digest
from izh.errors import RequestError
from izh.multimodal.encoder import VisionConfig
from izh.multimodal.pixels import UnsupportedPixels, to_rgb

MEDIA_TYPES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",  # not registered, but widely written
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_IMAGE_BYTES = 16 * 2**20
MAX_IMAGE_PIXELS = 36_000_000  # an 8K frame; about 110 MB as RGB


@dataclass(frozen=True, eq=False, slots=True)
class PreparedImage:
    """What an encoder takes: `pixels` [3, S, S] float32 in [-1, 1] on the CPU, detached; `digest` names the decoded
    image together with how it was prepared; `width` and `height` are the image's own."""

    pixels: Tensor
    digest: bytes
    width: int
    height: int


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
        self._recipe = f"rgb on white, bicubic to {self.image_size}x{self.image_size}, -1..1"

    def __call__(self, uri: str, param: str = "image_url") -> PreparedImage:
        """Decode and prepare one image. Raises RequestError naming `param` for anything that is not accepted."""
        media_type, data = self._data(uri, param)
        rgb, mode = self._decode(media_type, data, param)
        name = digest("image", self._recipe, mode, rgb.width, rgb.height, rgb.tobytes())
        small = rgb.resize((self.image_size, self.image_size), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(small, np.float32)).permute(2, 0, 1).contiguous() / 127.5 - 1.0
        return PreparedImage(pixels, name, rgb.width, rgb.height)

    def _data(self, uri: str, param: str) -> tuple[str, bytes]:
        """The media type and the bytes of a data URI."""
        if uri[:5].lower() != "data:":
            raise RequestError(
                f"{param} must be a base64 data URI (data:image/png;base64,...); this server fetches no URLs", param
            )
        head, comma, payload = uri[5:].partition(",")
        media_type, _, encoding = (part.strip().lower() for part in head[:100].partition(";"))
        if not comma or encoding != "base64":
            raise RequestError(f"{param} must have the form data:image/png;base64,...", param)
        if media_type not in MEDIA_TYPES:
            raise RequestError(f"{param} has the media type {media_type!r}; supported: {', '.join(MEDIA_TYPES)}", param)
        size = len(payload) * 3 // 4 - payload[-2:].count("=")
        if size > self.max_image_bytes:
            raise RequestError(f"{param} has {size} bytes of image, at most {self.max_image_bytes} are allowed", param)
        try:
            data = base64.b64decode(payload, validate=True)
        except ValueError as error:
            raise RequestError(f"{param} is not valid base64: {error}", param) from error
        return media_type, data

    def _decode(self, media_type: str, data: bytes, param: str) -> tuple[Image.Image, str]:
        """The upright RGB image, and the mode its file has."""
        try:
            # Opening reads the header only.
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                self._check(media_type, image, param)
                image.load()
                return to_rgb(image, _depth(image, data)), image.mode
        except RequestError:
            raise
        except UnsupportedPixels as error:
            raise RequestError(f"{param}: {error}", param) from error
        except UnidentifiedImageError as error:
            raise RequestError(f"{param} is not a readable {MEDIA_TYPES[media_type]} image", param) from error
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise RequestError(
                f"{param} is too large, at most {self.max_image_pixels} pixels are allowed", param
            ) from error
        except Exception as error:
            # Hostile bytes can make the decoders raise nearly anything.
            raise RequestError(f"{param} cannot be decoded: {error}", param) from error

    def _check(self, media_type: str, image: Image.Image, param: str) -> None:
        """Refuse by what the header says."""
        num_pixels = image.width * image.height
        if num_pixels > self.max_image_pixels:
            raise RequestError(
                f"{param} is {image.width}x{image.height} = {num_pixels} pixels, at most {self.max_image_pixels} are "
                "allowed",
                param,
            )
        # Cameras write JPEGs with a preview behind the picture; Pillow calls these MPO. The picture comes first.
        is_jpeg = image.format == "MPO"
        found = "JPEG" if is_jpeg else image.format
        if found != MEDIA_TYPES[media_type]:
            raise RequestError(f"{param} says {media_type}, but its bytes are {found}", param)
        if not is_jpeg and getattr(image, "is_animated", False):
            raise RequestError(f"{param} is animated; only images of one frame are supported", param)


def _depth(image: Image.Image, data: bytes) -> int:
    """Bits per channel in the file: PNG says it in its header; in the other formats no channel has more than 8."""
    return data[24] if image.format == "PNG" else 8
