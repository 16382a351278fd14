"""Embeddings and reranking.

Owns: the public names, each imported when first asked for.
Must not know: the engine, HTTP, other features.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "DecoderEncoder": "izh.pooling.encoders",
    "HFEncoder": "izh.pooling.encoders",
    "PoolingService": "izh.pooling.service",
    "load_embedder": "izh.pooling.load",
    "load_reranker": "izh.pooling.load",
    "pool_hidden": "izh.pooling.pool",
}

__all__ = ["DecoderEncoder", "HFEncoder", "PoolingService", "load_embedder", "load_reranker", "pool_hidden"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
