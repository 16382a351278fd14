"""The ops a model is made of, and the low-rank products by name.

Owns: the public names `grouped_lora` (the definition), `bgmv` and `sgmv` (Triton), each imported when first asked for.
Must not know: anything above.
"""

from importlib import import_module
from typing import Any

_HOME = {"grouped_lora": "izh.kernels.lora", "bgmv": "izh.kernels.triton.lora", "sgmv": "izh.kernels.triton.lora"}

__all__ = ["bgmv", "grouped_lora", "sgmv"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
