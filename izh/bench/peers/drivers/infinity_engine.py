"""Infinity's asynchronous engine in this process, on torch, asked for all texts in one call."""

import asyncio
from typing import Any

import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs


class Engine:
    """Batches of 32, as it makes them when nothing else is asked."""

    def __init__(self, *, model: str, num_threads: int, **_others: Any) -> None:
        torch.set_num_threads(num_threads)
        self._loop = asyncio.new_event_loop()
        arguments = EngineArgs(
            model_name_or_path=model,
            engine="torch",
            device="cpu",
            dtype="float32",
            bettertransformer=False,
            model_warmup=False,
        )
        self._engine = AsyncEmbeddingEngine.from_args(arguments)
        self._loop.run_until_complete(self._engine.astart())

    def embed(self, texts: list[str]) -> Any:
        """See `main.py`."""
        vectors, _num_tokens = self._loop.run_until_complete(self._engine.embed(sentences=texts))
        return vectors
