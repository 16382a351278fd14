"""izh: one resident base model, many kinds of request, one batch.

Public names are imported lazily, so `import izh` costs nothing until one of them is used.
"""

from importlib import import_module
from typing import Any

from izh.version import __version__

_PUBLIC = {
    "LLM": "izh.llm",
    "AsyncLLM": "izh.engine.async_llm",
    "Server": "izh.server.app",
    "SamplingParams": "izh.request",
    "PoolingParams": "izh.request",
}

__all__ = ["LLM", "AsyncLLM", "PoolingParams", "SamplingParams", "Server", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'izh' has no attribute {name!r}")
