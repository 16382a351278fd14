"""LoRA adapters: many, in one batch of the base model.

Public: AdapterBank, AdapterLinear, imported lazily so that the host side stays free of what it does not need.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {"AdapterBank": "izh.adapters.bank", "AdapterLinear": "izh.adapters.linear"}

__all__ = ["AdapterBank", "AdapterLinear"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'izh.adapters' has no attribute {name!r}")
