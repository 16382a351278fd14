"""The offline face: a list of prompts in, a list of answers out, the engine in this very process.

Owns: LLM, and the progress bar over what it does. Must not know: HTTP, processes.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from izh.config import EngineOptions
from izh.engine.build import build, pack_features
from izh.engine.control import Control
from izh.engine.core import EngineCore
from izh.engine.messages import LoadAdapter, UnloadAdapter
from izh.errors import IzhError, OptionError, error_of
from izh.model.source import resolve
from izh.outputs import RequestOutput, RerankOutput
from izh.request import PackedFeatures, SamplingParams, choices_of
from izh.text.output import OutputProcessor
from izh.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from izh.pooling.service import PoolingService

Prompt = str | list[int]
Messages = list[dict[str, Any]]
Features = Mapping[str, Any]
# A prompt, its token ids, how, which adapter, and what else goes along with the prompt.
_Asked = tuple[Prompt, list[int], SamplingParams, str | None, PackedFeatures | None]


class LLM:
    """A model for batch work, and the models beside it for vectors and scores. Options are EngineOptions' fields, as
    keywords.

    >>> llm = LLM("demo")
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text
    >>> llm.embed(["a sentence", "another"]).shape
    >>> llm.rerank("capital of France", ["Paris is a city", "Bread is baked"])[0].index
    """

    def __init__(
        self,
        model: str | None = "demo",
        *,
        embedder: str | Path | None = None,
        reranker: str | Path | None = None,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        """`model` None loads none: then it only embeds and reranks. `embedder` and `reranker` are directories, or
        "demo"; the demo model brings both, loaded when first used."""
        self.options = EngineOptions(model=model or "", **options)
        self._quiet = quiet
        self._generator: _Generator | None = None
        if model is not None:
            source = resolve(self.options.model, self.options.revision)
            tokenizer = Tokenizer.load(source.path)
            engine = build(self.options, source, quiet=quiet)
            self._generator = _Generator(tokenizer, engine.core, Control(engine.adapters), OutputProcessor(tokenizer))
        elif idle := sorted(set(options) - {"num_threads", "quantization"}):
            raise OptionError(f"{idle[0]} is about a model that generates, and this LLM has model=None; leave it out")
        self._embedder = None if embedder is None else self._load_embedder(embedder)
        self._reranker = None if reranker is None else self._load_reranker(reranker)
        self._inboxes: dict[str, deque[RequestOutput | IzhError]] = {}  # of every live request: its call's own

    @property
    def tokenizer(self) -> Tokenizer:
        """The generating model's."""
        return self._generating.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._generating.core.max_model_len

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        features: Features | Sequence[Features | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (text or token ids), in order. `params` and `lora` (an adapter's name, None for the base
        model) are one for all, or one each. `features` are those of a prompt with images (`VisionPrompt.features`),
        whose token ids are then the prompt; one for each prompt.

        Raises RequestError for the first prompt that cannot be answered; nothing is left running then.
        """
        texts = _as_list(prompts)
        all_params = params if isinstance(params, list) else [params or SamplingParams()] * len(texts)
        if len(all_params) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(all_params)} params: give one, or one for each")
        done: dict[str, RequestOutput] = {}
        adapters = [lora] * len(texts) if lora is None or isinstance(lora, str) else list(lora)
        if len(adapters) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(adapters)} lora: give one, or one for each")
        all_features = [features] if isinstance(features, Mapping) else list(features or [None] * len(texts))
        if len(all_features) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(all_features)} features: give one for each")
        # All of them before any runs: one may be refused.
        token_ids = [self._encode(text) for text in texts]
        packed = [None if each is None else pack_features(each) for each in all_features]
        asked = {_new_id(): each for each in zip(texts, token_ids, all_params, adapters, packed, strict=True)}
        with progress_bar("Generating", len(asked), self._shows(progress)) as advance:
            for piece in self._run(asked):
                if piece.request_id in done:
                    done[piece.request_id].add(piece)
                else:
                    done[piece.request_id] = piece
                advance(1 if piece.finished else 0, sum(len(output.token_ids) for output in piece.outputs))
        return [done[request_id] for request_id in asked]

    def chat(
        self,
        messages: Messages | list[Messages],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template. `params` and `lora` as in
        `generate`; `template` goes to `Tokenizer.chat` (add_generation_prompt, continue_final_message, tools,
        template_kwargs)."""
        several = [messages] if _is_conversation(messages) else messages
        prompts = [self.tokenizer.chat(cast(Messages, each), **template) for each in several]
        return self.generate(prompts, params, lora=lora, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Answer one prompt, yielding what is new after each step. Closing the iterator aborts the request. Several
        streams may be read in turns."""
        yield from self._run({_new_id(): (prompt, self._encode(prompt), params or SamplingParams(), None, None)})

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """The vectors of texts (or lists of token ids), in order: [S, D] float32, one row also for one text.

        `dimensions` cuts the vectors of a model trained for that. `prompt_name`: which of the model's prompts goes
        before each text; None: the one that the model names. `truncate_prompt_tokens` cuts each text to so many tokens,
        -1 to what the model takes; None: what is too long is refused. Raises RequestError for the first text that
        cannot be embedded, with none of them computed; OptionError without an embedder.
        """
        from izh.pooling import inputs
        from izh.pooling.offline import embed_all

        given = inputs.check_input(texts)
        service = self.embedder
        with progress_bar("Embedding", len(given), self._shows(progress)) as advance:
            return embed_all(
                service,
                given,
                dimensions=dimensions,
                prompt_name=prompt_name,
                truncate_prompt_tokens=truncate_prompt_tokens,
                after=advance,
            ).numpy()

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        raw_scores: bool = False,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[RerankOutput]:
        """The `top_n` documents (None: all) that answer the query best, best first, ties by index.

        `raw_scores` leaves out the model's last activation. `truncate_prompt_tokens` as in `embed`, of query and
        document together. Raises RequestError for the first document that cannot be scored, with none of them computed;
        OptionError without a reranker.
        """
        from izh.pooling.offline import rerank_all

        service = self.reranker
        with progress_bar("Reranking", len(documents), self._shows(progress)) as advance:
            ranked = rerank_all(
                service,
                query,
                documents,
                top_n=top_n,
                raw_scores=raw_scores,
                truncate_prompt_tokens=truncate_prompt_tokens,
                after=advance,
            )
        return [RerankOutput(index, score, documents[index]) for index, score in ranked]

    @property
    def embedder(self) -> "PoolingService":
        """What `embed` computes with. Raises OptionError when there is none."""
        if self._embedder is None:
            self._embedder = self._load_embedder(self._demo("embedder"))
        return self._embedder

    @property
    def reranker(self) -> "PoolingService":
        """What `rerank` computes with. Raises OptionError when there is none."""
        if self._reranker is None:
            self._reranker = self._load_reranker(self._demo("reranker"))
        return self._reranker

    def _demo(self, role: str) -> str:
        if self.options.model != "demo":
            raise OptionError(f'no {role} was named: LLM(..., {role}=DIR), or {role}="demo"')
        return "demo"

    def _load_embedder(self, directory: str | Path) -> "PoolingService":
        from izh.pooling import load_embedder

        return load_embedder(directory, num_threads=self.options.num_threads, quantization=self.options.quantization)

    def _load_reranker(self, directory: str | Path) -> "PoolingService":
        from izh.pooling import load_reranker

        return load_reranker(directory, num_threads=self.options.num_threads, quantization=self.options.quantization)

    def load_lora(self, name: str, directory: str | Path, *, replace: bool = False) -> None:
        """Let prompts name the adapter of this directory from now on. Raises AdapterError, with nothing changed."""
        where = str(Path(directory).expanduser().absolute())
        self._command(LoadAdapter(call_id=0, name=name, directory=where, replace=replace))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Raises NotFoundError for an unknown name, AdapterInUseError while requests use it."""
        self._command(UnloadAdapter(call_id=0, name=name))

    def _command(self, command: LoadAdapter | UnloadAdapter) -> None:
        self._generating.control.add(command)
        (reply,) = self._generating.control.wait()
        if reply.error is not None:
            raise error_of(reply.kind, reply.error)

    def reset_prefix_cache(self) -> None:
        """Make later requests reuse nothing computed so far."""
        self._generating.core.reset_prefix_cache()

    @property
    def _generating(self) -> "_Generator":
        if self._generator is None:
            raise OptionError("this LLM has no model to generate with: it was made with model=None")
        return self._generator

    def _shows(self, progress: bool | None) -> bool:
        return (not self._quiet) if progress is None else progress

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        lora: str | None,
        features: PackedFeatures | None,
    ) -> None:
        self._generating.processor.add(request_id, token_ids, params, prompt if isinstance(prompt, str) else None)
        adapters = () if lora is None else ((lora, 1.0),)
        arrival_s = time.monotonic()
        for request in choices_of(request_id, token_ids, params, arrival_s, adapters=adapters, features=features):
            self._generating.core.add(request)

    def _run(self, asked: dict[str, _Asked]) -> Iterator[RequestOutput]:
        """Add what is asked, by request id, and step until all of it is finished; abort what is left of it when stopped
        early. Other calls' requests move on meanwhile, and what comes of them waits in their inboxes."""
        inbox: deque[RequestOutput | IzhError] = deque()
        live: set[str] = set()
        try:
            for request_id, each in asked.items():
                self._inboxes[request_id] = inbox
                live.add(request_id)
                self._add(request_id, *each)
            while live:
                while not inbox:
                    self._step()
                item = inbox.popleft()
                if isinstance(item, IzhError):
                    raise item
                if item.finished:
                    live.discard(item.request_id)
                    del self._inboxes[item.request_id]
                yield item
        finally:
            for request_id in live:
                del self._inboxes[request_id]
                for engine_id in self._generating.processor.abort(request_id):
                    self._generating.core.abort(engine_id)

    def _step(self) -> None:
        """One step of the engine, whose outputs go to the calls that asked for them."""
        processed = self._generating.processor.process(self._generating.core.step())
        for engine_id in processed.abort:
            self._generating.core.abort(engine_id)
        for request_id, finish in processed.failed:
            self._inboxes[request_id].append(error_of(finish.kind, finish.error or "unknown error", finish.param))
        for piece in processed.ready:
            self._inboxes[piece.request_id].append(piece)


@dataclass(frozen=True, slots=True)
class _Generator:
    """The parts that answer prompts."""

    tokenizer: Tokenizer
    core: EngineCore
    control: Control
    processor: OutputProcessor


@contextmanager
def progress_bar(title: str, total: int, show: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, with the rate of tokens. It yields what moves it on, by so many answers and tokens."""
    bar = Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
        disable=not show,
    )
    start, num_tokens = time.monotonic(), 0
    task = bar.add_task("", total=total, rate="")

    def advance(num_done: int, tokens: int) -> None:
        nonlocal num_tokens
        num_tokens += tokens
        bar.update(task, advance=num_done, rate=f"{num_tokens / (time.monotonic() - start):.0f} tokens/s")

    with bar:
        yield advance


def _new_id() -> str:
    return f"offline-{uuid.uuid4().hex}"


def _is_conversation(messages: Messages | list[Messages]) -> bool:
    return bool(messages) and isinstance(messages[0], dict)


def _as_list(prompts: Prompt | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(list[int], prompts) if isinstance(prompts, list) else prompts]
    return [*cast(list[Prompt], prompts)]
