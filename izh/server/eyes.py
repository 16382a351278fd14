"""What reads images for the model that is served.

Owns: where a model's eyes come from: its own checkpoint, or the directory of a VisionPath; whether that one fits.
Must not know: requests, HTTP.
"""

from pathlib import Path

from izh.errors import OptionError
from izh.model.demo import demo_vision
from izh.model.load import load_spec
from izh.model.source import resolve
from izh.multimodal.seam import MultimodalProcessor
from izh.multimodal.vision_path import VisionPath
from izh.multimodal.vlm.model import VisionModel, is_vision_model
from izh.text.tokenizer import Tokenizer


def load_eyes(model: str, tokenizer: Tokenizer, vision: str | None) -> MultimodalProcessor | None:
    """Of the checkpoint or .gguf file at `model`: its own vision tower; else, if asked for, the VisionPath in the
    directory `vision` ("demo" is the one that this package brings for the demo model); else None.

    Raises ModelLoadError, and OptionError for a `vision` that is one too many or was made for another model.
    """
    directory = Path(model)
    if (directory / "config.json").is_file() and is_vision_model(directory):
        if vision is not None:
            raise OptionError(f"--vision {vision}: the checkpoint {model} has a vision tower of its own; leave it out")
        return VisionModel.load(directory)
    if vision is None:
        return None
    path = VisionPath.load(demo_vision() if vision == "demo" else Path(vision).expanduser(), tokenizer)
    spec = load_spec(resolve(model))
    rows, pairs = path.encoder.config.output_width, sum(path.sections)
    if rows != spec.image_row_width:
        raise OptionError(f"--vision {vision} makes rows of {rows} numbers, but {model} takes {spec.image_row_width}")
    if 2 * pairs != spec.ropes[0].rotary_dim:
        raise OptionError(
            f"--vision {vision} turns {pairs} frequency pairs, but {model} has {spec.ropes[0].rotary_dim // 2}"
        )
    return path
