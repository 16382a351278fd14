"""A tiny model with random eyes: what images come to is arbitrary, and it is theirs alone."""

import base64
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from izh.multimodal import VisionConfig, VisionEncoder, VisionPath
from izh.text.tokenizer import Tokenizer

PLACEHOLDER, SECTIONS = 0, (2, 3, 3)  # the pad token; 16 numbers of each head are rotated
NUM_ROWS = 16


def encoder(seed: int = 0) -> VisionEncoder:
    torch.manual_seed(seed)
    made = VisionEncoder(VisionConfig(image_size=16, patch_size=4, width=32, heads=2, layers=2, output_width=64))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)  # far enough apart for images to change answers
    return made


def path(folder: Path, seed: int = 0) -> VisionPath:
    return VisionPath(Tokenizer.load(folder), encoder(seed), PLACEHOLDER, SECTIONS)


def picture(seed: int, size: tuple[int, int] = (20, 16)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def uri(image: Image.Image, form: str = "PNG") -> str:
    out = io.BytesIO()
    image.save(out, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: dict[str, object]) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}
