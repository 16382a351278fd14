"""The generator as what embeds and reranks: in its own steps, with its adapters.

Owns: Resident, which makes of the engine the PoolingServices that the routes ask; ResidentPooler, their encoder.
Must not know: routes, bodies.
Invariant: what a caller may send is checked, tokenized and answered by PoolingService, as for any other encoder; only
where the vectors come from differs.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from izh.engine.async_llm import AsyncLLM
from izh.errors import ModelLoadError, OptionError
from izh.model.projections import read_json
from izh.pooling.judge import JudgeTokenizer, yes_over_no
from izh.pooling.load import MAX_DOCUMENTS, MAX_INPUTS
from izh.pooling.metrics import PoolingMetrics
from izh.pooling.recipe import Recipe, read_sentence_files
from izh.pooling.service import PoolingService
from izh.request import Entry, PoolingParams

_WINDOW_TOKENS = 2048
"""A call's prompts go to the engine in groups of about this many tokens, two of them at a time: enough to fill a step,
and few enough that whoever comes next, to generate or to embed, does not wait for all of a long list."""

Finish = Callable[[Tensor, Sequence[Entry]], list[Tensor]]


class ResidentPooler:
    """See RemotePooler (izh/pooling/encoders.py). Every prompt is a request of its own."""

    def __init__(self, engine: AsyncLLM, params: PoolingParams, adapter: str | None) -> None:
        self.vocab_size = engine.info.vocab_size
        self._engine = engine
        self._params = params
        self._adapters = () if adapter is None else ((adapter, 1.0),)

    def submit(self, entries: Sequence[Entry], finish: Finish) -> "Future[list[Tensor]]":
        """Call it on the engine's event loop. Cancelling the future aborts what still runs."""
        return asyncio.run_coroutine_threadsafe(self._pool(entries, finish), asyncio.get_running_loop())

    async def _pool(self, entries: Sequence[Entry], finish: Finish) -> list[Tensor]:
        window = asyncio.Semaphore(2)

        async def group(some: Sequence[Entry]) -> list[Tensor]:
            async with window:
                return await _all([self._vector(entry) for entry in some])

        groups = await _all([group(some) for some in _groups(entries)])
        return finish(torch.stack([vector for some in groups for vector in some]), entries)

    async def _vector(self, entry: Entry) -> Tensor:
        params = self._params
        if entry.skip:
            params = PoolingParams(mode=params.mode, normalize=params.normalize, skip=entry.skip)
        output = await self._engine.embed(entry.ids, params, adapters=self._adapters)
        return torch.from_numpy(output.vector.copy())


class Resident:
    """What the generator does besides generating. Its services hold no threads and need no closing."""

    def __init__(self, engine: AsyncLLM, *, reranks: bool = False, metrics: PoolingMetrics) -> None:
        """Raises ModelLoadError for a checkpoint that wants to be pooled in a way we do not know, OptionError when it
        cannot rerank."""
        self._engine = engine
        self._metrics = metrics
        self._services: dict[tuple[str, str], PoolingService] = {}
        self._tokenizer = engine.tokenizer.encoder()
        self._recipe, length = _recipe(Path(engine.info.path), self._tokenizer.model_max_length)
        self._max_length = min(engine.info.max_model_len, length or engine.info.max_model_len)
        self._judge = _judge(engine) if reranks else None

    @property
    def names(self) -> list[str]:
        """What requests may call it: the model's name, or an adapter's."""
        return [self._engine.info.name, *self._engine.info.adapters]

    @property
    def reranks(self) -> bool:
        return self._judge is not None

    def embedder(self, name: str | None) -> PoolingService:
        """Vectors by the model, or by the adapter of that name."""
        return self._service("embed", name or self._engine.info.name)

    def reranker(self, name: str | None) -> PoolingService:
        """Scores by the model, or by the adapter of that name."""
        assert self._judge is not None
        return self._service("rerank", name or self._engine.info.name)

    def _service(self, task: str, name: str) -> PoolingService:
        service = self._services.get((task, name))
        if service is None:
            service = self._embeds(name) if task == "embed" else self._judges(name)
            service.metrics = self._metrics.of(name)
            # Those of adapters that have been unloaded go.
            kept = {key: each for key, each in self._services.items() if key[1] in self.names}
            self._services = kept | {(task, name): service}
        return service

    def _embeds(self, name: str) -> PoolingService:
        params = PoolingParams(mode=self._recipe.modes[0], normalize=False)  # the recipe's last steps are the service's
        return PoolingService(
            ResidentPooler(self._engine, params, self._adapter(name)),
            self._tokenizer,
            name,
            recipe=self._recipe,
            max_model_len=self._max_length,
            max_batch=MAX_INPUTS,
        )

    def _judges(self, name: str) -> PoolingService:
        assert self._judge is not None
        params = PoolingParams(logit_ids=self._judge.answer_ids)
        return PoolingService(
            ResidentPooler(self._engine, params, self._adapter(name)),
            self._judge,
            name,
            recipe=Recipe(modes=("last",), normalize=False),
            score_head=yes_over_no,
            score_activation=torch.sigmoid,
            max_model_len=self._engine.info.max_model_len,
            max_batch=MAX_DOCUMENTS,
        )

    def _adapter(self, name: str) -> str | None:
        return None if name == self._engine.info.name else name


def _recipe(path: Path, tokenizer_length: int) -> tuple[Recipe, int | None]:
    """How the checkpoint wants its rows pooled, and the longest text that it was made for, which the tokenizer knows
    where no file says. One that says nothing of all that (a chat model) gives its last token's row, of length 1."""
    modules = path / "modules.json"
    if not modules.is_file() or not any(each.get("type", "").endswith(".Pooling") for each in read_json(modules)):
        return Recipe(modes=("last",)), None
    files = read_sentence_files(path)
    if len(files.recipe.modes) > 1:
        raise ModelLoadError(f"{path}: pooling modes {', '.join(files.recipe.modes)} side by side are not supported")
    if files.lower_case:
        raise ModelLoadError(f"{path}: do_lower_case is not supported for a decoder")
    return files.recipe, files.max_seq_length or tokenizer_length


def _judge(engine: AsyncLLM) -> JudgeTokenizer:
    if not engine.info.generates:
        raise OptionError("--reranker resident: this checkpoint has no LM head, so it has no yes and no to weigh")
    try:
        return JudgeTokenizer(engine.tokenizer)
    except ModelLoadError as error:
        raise OptionError(f"--reranker resident: {error}") from error


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
