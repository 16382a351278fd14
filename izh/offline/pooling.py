"""What `LLM.embed` and `LLM.rerank` compute with.

Owns: PoolingModels: which model does it, and when that is loaded; OfflinePooler, the generator's part.
Must not know: how texts are read or answers shown.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from izh.config import RESIDENT, EngineOptions
from izh.errors import ModelLoadError, OptionError
from izh.offline.engine import Asked, OfflineEngine
from izh.outputs import PoolingOutput
from izh.pooling import load_embedder, load_reranker
from izh.pooling.resident import PoolerOf, Resident
from izh.pooling.service import PoolingService
from izh.request import Entry, PoolingParams

Named = str | Path | None


class OfflinePooler:
    """See RemotePooler (izh/pooling/encoders.py): it has the results when `submit` returns."""

    def __init__(self, engine: OfflineEngine, params: PoolingParams, lora: str | None) -> None:
        self.vocab_size = engine.core.vocab_size
        self._engine = engine
        self._params = params
        self._lora = lora

    def submit(
        self, entries: Sequence[Entry], finish: Callable[[Tensor, Sequence[Entry]], list[Tensor]]
    ) -> "Future[list[Tensor]]":
        """Raises: RequestError for an entry or an adapter that the engine does not take."""
        rows: dict[int, Tensor] = {}
        asked = [Asked(each.ids, self._params.skipping(each.skip), lora=self._lora) for each in entries]
        for index, output in self._engine.run(asked):
            assert isinstance(output, PoolingOutput)
            rows[index] = torch.from_numpy(output.vector.copy())
        future: Future[list[Tensor]] = Future()
        future.set_result(finish(torch.stack([rows[index] for index in range(len(entries))]), entries))
        return future


class PoolingModels:
    """The models beside the generator, and the generator itself."""

    def __init__(
        self, options: EngineOptions, engine: OfflineEngine | None, *, embedder: Named, reranker: Named
    ) -> None:
        """What is named is loaded at once; "resident" is the generator. Raises ModelLoadError, OptionError."""
        self._options = options
        self._engine = engine
        self._resident: Resident | None = None
        self._embedder = None if embedder is None else self._load_embedder(embedder)
        self._reranker = None if reranker is None else self._load_reranker(reranker)

    def embedder(self, lora: str | None = None) -> PoolingService:
        """With `lora` the generator through this adapter; else what was named, the demo's, or the generator."""
        if lora is not None:
            return self._resident_embedder(lora)
        if self._embedder is None:
            demo_or_resident = "demo" if self._options.model == "demo" else RESIDENT
            self._embedder = self._load_embedder(demo_or_resident)
        return self._embedder

    def reranker(self, lora: str | None = None) -> PoolingService:
        """As `embedder`; the generator judges without an adapter only where it was named: few models were taught to."""
        if lora is not None:
            return self._resident_reranker(lora)
        if self._reranker is None:
            if self._options.model != "demo":
                raise OptionError(
                    'no reranker was named: LLM(..., reranker=DIR), reranker="demo", or reranker="resident", the '
                    "generator"
                )
            self._reranker = self._load_reranker("demo")
        return self._reranker

    def _load_embedder(self, named: str | Path) -> PoolingService:
        if named == RESIDENT:
            return self._resident_embedder(None)
        return load_embedder(named, **self._how())

    def _load_reranker(self, named: str | Path) -> PoolingService:
        if named == RESIDENT:
            return self._resident_reranker(None)
        return load_reranker(named, **self._how())

    def _how(self) -> dict[str, Any]:
        return {"num_threads": self._options.num_threads, "quantization": self._options.quantization}

    def _resident_embedder(self, lora: str | None) -> PoolingService:
        engine, resident = self._generator("embedder")
        return resident.embedder(lora or engine.name, _pooler_of(engine, lora))

    def _resident_reranker(self, lora: str | None) -> PoolingService:
        engine, resident = self._generator("reranker")
        try:
            judge = resident.judge(engine.generates)
        except ModelLoadError as error:
            raise OptionError(f'reranker="resident": {error}') from error
        return resident.reranker(lora or engine.name, judge, _pooler_of(engine, lora))

    def _generator(self, role: str) -> tuple[OfflineEngine, Resident]:
        if self._engine is None:
            raise OptionError(
                f"there is no {role} here: this LLM was made with model=None; name one, "
                f'LLM(None, {role}=DIR), or {role}="demo"'
            )
        if self._resident is None:
            self._resident = Resident(self._engine.path, self._engine.tokenizer, self._engine.core.max_model_len)
        return self._engine, self._resident


def _pooler_of(engine: OfflineEngine, lora: str | None) -> PoolerOf:
    return lambda params: OfflinePooler(engine, params, lora)
