"""The models beside the generator: their texts are read here, their rows are computed in the engine process.

Owns: `load_beside`, which makes such a service; EngineEncoder, its encoder.
Must not know: routes, bodies, how the engine divides its time.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from izh.config import ServerOptions
from izh.engine.async_llm import AsyncLLM
from izh.engine.messages import EncoderTask
from izh.pooling import load_embedder, load_reranker
from izh.pooling.service import PoolingService
from izh.request import Entry

DEMO_NAMES: dict[EncoderTask, str] = {"embed": "minilm-embed", "rerank": "minilm-rerank"}


class EngineEncoder:
    """See RemoteEncoder (izh/pooling/encoders.py). Made on the engine's event loop, called from other threads."""

    def __init__(self, engine: AsyncLLM, task: EncoderTask) -> None:
        self._engine = engine
        self._task = task
        self._loop = asyncio.get_running_loop()

    def compute(self, entries: Sequence[Entry]) -> list[Tensor]:
        work = self._engine.encode(self._task, list(entries))
        results = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        rows = [torch.from_numpy(np.frombuffer(each, "<f4").copy()) for each in results]
        return [row[0] if entry.is_scored else row for row, entry in zip(rows, entries, strict=True)]


async def load_beside(engine: AsyncLLM, task: EncoderTask, directory: str, options: ServerOptions) -> PoolingService:
    """The service of the model that the engine was started with for this task. Raises ModelLoadError."""
    load = {"embed": load_embedder, "rerank": load_reranker}[task]
    return await asyncio.to_thread(
        load,
        directory,
        model_name=DEMO_NAMES[task] if directory == "demo" else None,
        hold_s=options.pool_max_wait_ms / 1000,
        elsewhere=EngineEncoder(engine, task),
    )
