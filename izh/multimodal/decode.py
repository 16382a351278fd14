"""Bytes that somebody sent become the pixels of one image, or a RequestError that says why not.

Owns: what is accepted, and what it may cost; data URIs.
Must not know: encoders, requests, where bytes came from. It reads no file and fetches nothing.
Invariant: any bytes give either an image's right pixels or a RequestError; bytes and pixels are bounded before they
are decoded.
"""

import base64
import re
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from izh.errors import RequestError
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
PIXELS_BOUND = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # beyond it Pillow itself refuses to open an image


def read_data_uri(uri: str, param: str, max_bytes: int = MAX_IMAGE_BYTES) -> tuple[str, bytes]:
    """The media type and the bytes of a base64 data URI of an image. Raises RequestError naming `param`."""
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
    if size > max_bytes:
        raise RequestError(f"{param} has {size} bytes of image, at most {max_bytes} are allowed", param)
    try:
        data = base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise RequestError(f"{param} is not valid base64: {error}", param) from error
    return media_type, data


def decode_image(
    data: bytes, media_type: str | None, param: str, max_pixels: int = MAX_IMAGE_PIXELS
) -> tuple[Image.Image, str]:
    """The upright RGB image, and the mode that its file has. `media_type` is what the sender calls it, None if nothing.

    Raises RequestError naming `param`.
    """
    try:
        # Opening reads the header only.
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check(media_type, image, param, max_pixels)
            image.load()
            return to_rgb(image, _depth(image, data)), image.mode
    except RequestError:
        raise
    except UnsupportedPixels as error:
        raise RequestError(f"{param}: {error}", param) from error
    except UnidentifiedImageError as error:
        kind = "" if media_type is None else MEDIA_TYPES[media_type] + " "
        raise RequestError(f"{param} is not a readable {kind}image", param) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the only ones that come first
        found = re.search(r"\d+ pixels", str(error))
        size = found[0] if found else f"more than {PIXELS_BOUND} pixels"
        raise RequestError(f"{param} is {size}, at most {max_pixels} are allowed", param) from error
    except Exception as error:
        # Hostile bytes can make the decoders raise nearly anything.
        raise RequestError(f"{param} cannot be decoded: {error}", param) from error


def _check(media_type: str | None, image: Image.Image, param: str, max_pixels: int) -> None:
    """Refuse by what the header says."""
    num_pixels = image.width * image.height
    if num_pixels > max_pixels:
        raise RequestError(
            f"{param} is {image.width}x{image.height} = {num_pixels} pixels, at most {max_pixels} are allowed", param
        )
    # Cameras write JPEGs with a preview behind the picture; Pillow calls these MPO. The picture comes first.
    is_jpeg = image.format == "MPO"
    found = "JPEG" if is_jpeg else image.format
    if media_type is not None and found != MEDIA_TYPES[media_type]:
        raise RequestError(f"{param} says {media_type}, but its bytes are {found}", param)
    if not is_jpeg and getattr(image, "is_animated", False):
        raise RequestError(f"{param} is animated; only images of one frame are supported", param)


def _depth(image: Image.Image, data: bytes) -> int:
    """Bits per channel in the file: PNG says it in its header; in the other formats no channel has more than 8."""
    return data[24] if image.format == "PNG" else 8
