"""Images in the prompt.

Public: VisionConfig, VisionEncoder, VisionProcessor, VisionPath, VisionPrompt, expand_images, mrope_cos_sin,
validate_features, imported lazily so that whoever needs one of them does not load what the others need.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "VisionConfig": "izh.multimodal.encoder",
    "VisionEncoder": "izh.multimodal.encoder",
    "VisionProcessor": "izh.multimodal.processor",
    "VisionPath": "izh.multimodal.vision_path",
    "VisionPrompt": "izh.multimodal.prompt",
    "expand_images": "izh.multimodal.prompt",
    "mrope_cos_sin": "izh.multimodal.mrope",
    "validate_features": "izh.multimodal.features",
}

__all__ = [
    "VisionConfig",
    "VisionEncoder",
    "VisionPath",
    "VisionProcessor",
    "VisionPrompt",
    "expand_images",
    "mrope_cos_sin",
    "validate_features",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'izh.multimodal' has no attribute {name!r}")
