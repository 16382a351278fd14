"""The covered model families, keyed by the `model_type` of an HF config.

A family is one small file: a mapping from its config to a ModelSpec and a table of weight names.
"""

from izh.errors import ModelLoadError
from izh.model.families.family import Family
from izh.model.families.gemma3 import GEMMA3, GEMMA3_TEXT
from izh.model.families.image_text import IMAGE_TEXT
from izh.model.families.llama import LLAMA
from izh.model.families.mistral import MISTRAL
from izh.model.families.phi3 import PHI3
from izh.model.families.qwen2 import QWEN2
from izh.model.families.qwen3 import QWEN3
from izh.model.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, PHI3, GEMMA3_TEXT, GEMMA3, *IMAGE_TEXT)
}


def family_of(model_type: str) -> Family:
    """Raises ModelLoadError, naming the covered families, when this one is not among them."""
    if model_type not in FAMILIES:
        raise ModelLoadError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
