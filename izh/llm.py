"""The offline face: a list of prompts in, a list of answers out, the engine in this very process.

Owns: LLM: how prompts, conversations and texts become requests, and their outputs answers.
Must not know: HTTP, processes, how the engine is stepped.
"""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from izh.config import EngineOptions
from izh.engine.build import pack_features
from izh.engine.messages import LoadAdapter, UnloadAdapter
from izh.errors import OptionError
from izh.offline.engine import Asked, OfflineEngine
from izh.offline.pooling import PoolingModels
from izh.offline.progress import progress_bar
from izh.outputs import RequestOutput, RerankOutput
from izh.pooling import inputs
from izh.pooling.offline import embed_all, rerank_all
from izh.pooling.service import PoolingService
from izh.request import SamplingParams
from izh.text.tokenizer import Tokenizer

Prompt = str | list[int]
Messages = list[dict[str, Any]]
Features = Mapping[str, Any]


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
        "demo", or "resident": the model itself. The demo model brings both, loaded when first used; of another one that
        came without, the model itself embeds."""
        self.options = EngineOptions(model=model or "", **options)
        self._quiet = quiet
        self._engine: OfflineEngine | None = None
        if model is not None:
            self._engine = OfflineEngine(self.options, quiet=quiet)
        elif idle := sorted(set(options) - {"num_threads", "quantization"}):
            raise OptionError(f"{idle[0]} is about a model that generates, and this LLM has model=None; leave it out")
        self._pooling = PoolingModels(self.options, self._engine, embedder=embedder, reranker=reranker)

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
        adapters = [lora] * len(texts) if lora is None or isinstance(lora, str) else list(lora)
        if len(adapters) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(adapters)} lora: give one, or one for each")
        all_features = [features] if isinstance(features, Mapping) else list(features or [None] * len(texts))
        if len(all_features) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(all_features)} features: give one for each")
        # All of them before any runs: one may be refused.
        token_ids = [self._encode(text) for text in texts]
        packed = [None if each is None else pack_features(each) for each in all_features]
        asked = [
            Asked(ids, each, _text(text), adapter, more)
            for text, ids, each, adapter, more in zip(texts, token_ids, all_params, adapters, packed, strict=True)
        ]
        done: dict[int, RequestOutput] = {}
        with progress_bar("Generating", len(asked), self._shows(progress)) as advance:
            for index, piece in self._generating.run(asked):
                assert isinstance(piece, RequestOutput)
                if index in done:
                    done[index].add(piece)
                else:
                    done[index] = piece
                advance(1 if piece.finished else 0, sum(len(output.token_ids) for output in piece.outputs))
        return [done[index] for index in range(len(asked))]

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
        asked = Asked(self._encode(prompt), params or SamplingParams(), _text(prompt))
        for _, piece in self._generating.run([asked]):
            assert isinstance(piece, RequestOutput)
            yield piece

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        lora: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The vectors of texts (or lists of token ids), in order: [S, D] float32, one row also for one text. With
        `lora`, an adapter's name, they are the model's own through it, whatever embedder there is.

        `dimensions` cuts the vectors of a model trained for that. `prompt_name`: which of the model's prompts goes
        before each text; None: the one that the model names. `truncate_prompt_tokens` cuts each text to so many tokens,
        -1 to what the model takes; None: what is too long is refused. Raises RequestError for the first text that
        cannot be embedded, with none of them computed; OptionError when nothing here embeds.
        """
        given = inputs.check_input(texts)
        service = self._pooling.embedder(lora)
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
        lora: str | None = None,
        raw_scores: bool = False,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
    ) -> list[RerankOutput]:
        """The `top_n` documents (None: all) that answer the query best, best first, ties by index. With `lora`, an
        adapter's name, the model itself judges, through it.

        `raw_scores` leaves out the model's last activation. `truncate_prompt_tokens` as in `embed`, of query and
        document together. Raises RequestError for the first document that cannot be scored, with none of them computed;
        OptionError without a reranker.
        """
        service = self._pooling.reranker(lora)
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
    def embedder(self) -> PoolingService:
        """What `embed` computes with. Raises OptionError when there is none."""
        return self._pooling.embedder()

    @property
    def reranker(self) -> PoolingService:
        """What `rerank` computes with. Raises OptionError when there is none."""
        return self._pooling.reranker()

    def load_lora(self, name: str, directory: str | Path, *, replace: bool = False) -> None:
        """Let prompts name the adapter of this directory from now on. Raises AdapterError, with nothing changed."""
        where = str(Path(directory).expanduser().absolute())
        self._generating.command(LoadAdapter(call_id=0, name=name, directory=where, replace=replace))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Raises NotFoundError for an unknown name, AdapterInUseError while requests use it."""
        self._generating.command(UnloadAdapter(call_id=0, name=name))

    def reset_prefix_cache(self) -> None:
        """Make later requests reuse nothing computed so far."""
        self._generating.core.reset_prefix_cache()

    @property
    def _generating(self) -> OfflineEngine:
        if self._engine is None:
            raise OptionError("this LLM has no model to generate with: it was made with model=None")
        return self._engine

    def _shows(self, progress: bool | None) -> bool:
        return (not self._quiet) if progress is None else progress

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def _text(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _is_conversation(messages: Messages | list[Messages]) -> bool:
    return bool(messages) and isinstance(messages[0], dict)


def _as_list(prompts: Prompt | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(list[int], prompts) if isinstance(prompts, list) else prompts]
    return [*cast(list[Prompt], prompts)]
