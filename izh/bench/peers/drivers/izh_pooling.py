"""izh's embedding service, asked for all texts in one call."""

import asyncio
from typing import Any

from izh.pooling import load_embedder


class Engine:
    """Its thread computes; the loop only waits."""

    def __init__(self, *, model: str, num_threads: int, **_others: Any) -> None:
        self._service = load_embedder(model, num_threads=num_threads)
        self._loop = asyncio.new_event_loop()

    def embed(self, texts: list[str]) -> Any:
        """See `main.py`."""
        vectors, _num_tokens = self._loop.run_until_complete(self._service.vectors(texts))
        return vectors
