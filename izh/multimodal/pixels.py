"""Whatever Pillow decodes becomes plain RGB pixels, or is refused.

Owns: the meaning of modes, depths, transparency and orientation.
Must not know: where the image came from, sizes, encoders. Color profiles are not applied.
Invariant: nothing is approximated silently: what Pillow cannot convert faithfully is done here, or refused.
"""

import numpy as np
from PIL import Image, ImageOps

WHITE = (255, 255, 255, 255)


class UnsupportedPixels(ValueError):
    """The image is well-formed and its pixels cannot be given faithfully; the message says why."""


def to_rgb(image: Image.Image, depth: int) -> Image.Image:
    """The loaded image upright (EXIF orientation applied), in mode RGB, transparency laid on white.

    `depth` is the file's bits per channel. Raises UnsupportedPixels.
    """
    upright = ImageOps.exif_transpose(image)
    key = upright.info.get("transparency")
    if upright.mode.startswith("I;16"):
        return _from_16_bit(upright, key)
    if upright.mode not in ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr"):
        raise UnsupportedPixels(f"pixels of mode {upright.mode} are not supported")
    if key is not None and upright.mode == "RGB" and depth > 8:
        # Pillow keeps the upper 8 bits of the pixels and the lower 8 of the key.
        raise UnsupportedPixels("16 bits per channel together with a transparent color are not supported")
    if isinstance(key, int) and upright.mode == "L" and depth < 8:
        # Pillow scales 2 and 4 bit grays to 8 bits, but not the key.
        upright.info["transparency"] = key * 255 // (2**depth - 1)
    if upright.has_transparency_data:
        rgba = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, WHITE), rgba).convert("RGB")
    return upright.convert("RGB")


def _from_16_bit(image: Image.Image, key: object) -> Image.Image:
    """Grays 0..65535 to 0..255 (Pillow's own conversion cuts off above 255); the gray `key`, if any, becomes white."""
    values = np.asarray(image).astype(np.uint32)
    gray = ((values + 128) // 257).astype(np.uint8)
    if isinstance(key, int):
        gray[values == key] = 255
    return Image.fromarray(gray).convert("RGB")
