"""The generator as what embeds and reranks over HTTP: in its own steps, with its adapters.

Owns: ResidentServices, which of its services a request means; ResidentPooler, their encoder; how much may wait for it.
Must not know: routes, bodies, what a checkpoint wants (izh/pooling/resident.py).
Invariant: what is refused because too much waits has begun nothing.
"""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from izh.engine.async_llm import AsyncLLM
from izh.errors import ModelLoadError, OptionError, OverloadedError, RequestError
from izh.pooling.metrics import PoolingMetrics
from izh.pooling.resident import Resident
from izh.pooling.service import PoolingService
from izh.request import Entry, PoolingParams
from izh.server.asked import Asked

_WINDOW_TOKENS = 2048
"""A call's prompts go to the engine in groups of about this many tokens, two of them at a time: enough to fill a step,
and few enough that whoever comes next, to generate or to embed, does not wait for all of a long list."""
MAX_QUEUED_TOKENS = 262_144
"""Tokens of unanswered calls, as of the models beside the generator (PoolingService)."""

Finish = Callable[[Tensor, Sequence[Entry]], list[Tensor]]


@dataclass(slots=True)
class Queued:
    """Tokens of the calls that have no answer yet."""

    most: int = MAX_QUEUED_TOKENS
    now: int = 0

    def take(self, num_tokens: int) -> None:
        """Raises OverloadedError, with the numbers, when there is no room; an empty queue takes any call."""
        if self.now and self.now + num_tokens > self.most:
            raise OverloadedError(
                f"{self.now} tokens are waiting to be computed and this request has {num_tokens}; at most {self.most} "
                "may wait. Try again later"
            )
        self.now += num_tokens


class ResidentPooler:
    """See RemotePooler (izh/pooling/encoders.py). Every prompt is a request of its own."""

    def __init__(
        self, engine: AsyncLLM, params: PoolingParams, adapter: str | None, asked: Asked, queued: Queued
    ) -> None:
        self.vocab_size = engine.info.vocab_size
        self._engine = engine
        self._params = params
        self._adapter = adapter
        self._asked = asked
        self._queued = queued

    def asking(self, asked: Asked) -> "ResidentPooler":
        """The same for another request. Raises RequestError for a scale of no adapter."""
        if asked.lora_scale is not None and self._adapter is None:
            raise RequestError("lora_scale is only allowed when model names an adapter", "lora_scale")
        return ResidentPooler(self._engine, self._params, self._adapter, asked, self._queued)

    def submit(self, entries: Sequence[Entry], finish: Finish) -> "Future[list[Tensor]]":
        """Call it on the engine's event loop. Cancelling the future aborts what still runs. Raises: OverloadedError."""
        num_tokens = sum(len(entry.ids) for entry in entries)
        self._queued.take(num_tokens)
        future = asyncio.run_coroutine_threadsafe(self._pool(entries, finish), asyncio.get_running_loop())
        future.add_done_callback(lambda _: self._leave(num_tokens))
        return future

    def _leave(self, num_tokens: int) -> None:
        self._queued.now -= num_tokens

    async def _pool(self, entries: Sequence[Entry], finish: Finish) -> list[Tensor]:
        window = asyncio.Semaphore(2)

        async def group(some: Sequence[Entry]) -> list[Tensor]:
            async with window:
                return await _all([self._vector(entry) for entry in some])

        groups = await _all([group(some) for some in _groups(entries)])
        return finish(torch.stack([vector for some in groups for vector in some]), entries)

    async def _vector(self, entry: Entry) -> Tensor:
        asked = self._asked
        scale = 1.0 if asked.lora_scale is None else asked.lora_scale
        output = await self._engine.embed(
            entry.ids,
            self._params.skipping(entry.skip),
            adapters=() if self._adapter is None else ((self._adapter, scale),),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
        )
        return torch.from_numpy(output.vector.copy())


class ResidentServices:
    """What the generator does besides generating."""

    def __init__(self, engine: AsyncLLM, *, reranks: bool = False, metrics: PoolingMetrics) -> None:
        """Raises ModelLoadError for a checkpoint that wants to be pooled in a way we do not know, OptionError when it
        cannot rerank."""
        info = engine.info
        self.queued = Queued()
        self._engine = engine
        self._metrics = metrics
        self._services: dict[tuple[str, str], PoolingService] = {}
        self._resident = Resident(Path(info.path), engine.tokenizer, info.max_model_len)
        try:
            self._judge = self._resident.judge(info.generates) if reranks else None
        except ModelLoadError as error:
            raise OptionError(f"--reranker resident: {error}") from error

    @property
    def names(self) -> list[str]:
        """What requests may call it: the model's name, or an adapter's."""
        return [self._engine.info.name, *self._engine.info.adapters]

    @property
    def reranks(self) -> bool:
        return self._judge is not None

    def embedder(self, name: str | None, asked: Asked) -> PoolingService:
        """Vectors by the model, or by the adapter of that name."""
        return self._service("embed", name or self._engine.info.name, asked)

    def reranker(self, name: str | None, asked: Asked) -> PoolingService:
        """Scores by the model, or by the adapter of that name."""
        return self._service("rerank", name or self._engine.info.name, asked)

    def _service(self, task: str, name: str, asked: Asked) -> PoolingService:
        service = self._services.get((task, name))
        if service is None:
            service = self._made(task, name)
            service.metrics = self._metrics.of(name)
            # Those of adapters that have been unloaded go.
            kept = {key: each for key, each in self._services.items() if key[1] in self.names}
            self._services = kept | {(task, name): service}
        if asked.param is None:
            return service
        own = copy.copy(service)
        assert isinstance(service.encoder, ResidentPooler)
        own.encoder = service.encoder.asking(asked)
        return own

    def _made(self, task: str, name: str) -> PoolingService:
        adapter = None if name == self._engine.info.name else name

        def pooler_of(params: PoolingParams) -> ResidentPooler:
            return ResidentPooler(self._engine, params, adapter, Asked(), self.queued)

        if task == "embed":
            return self._resident.embedder(name, pooler_of)
        assert self._judge is not None
        return self._resident.reranker(name, self._judge, pooler_of)


def _groups(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Neighbours of together about _WINDOW_TOKENS tokens."""
    first = num_tokens = 0
    for index, entry in enumerate(entries):
        if num_tokens and num_tokens + len(entry.ids) > _WINDOW_TOKENS:
            yield entries[first:index]
            first, num_tokens = index, 0
        num_tokens += len(entry.ids)
    yield entries[first:]


async def _all(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results in order. When one fails, the others are cancelled and the first error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
