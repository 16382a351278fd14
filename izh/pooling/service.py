"""Embeddings and reranking as a service: texts in, answers out, the event loop never blocked.

Owns: PoolingService: from an argument to an answer, by way of one thread that computes what many callers ask for.
Must not know: HTTP, files, which encoder it has.
Invariant: an answer depends on its own call alone: order is kept, and a call that is refused or fails leaves no trace.

    embed / rerank -> check -> tokenize -> Batcher ── packed ──> rows -> pool -> stages -> vectors -> answer
                                                   └─ padded ─┘                     └─ score_head -> scores
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from izh.errors import RequestError
from izh.pooling import inputs
from izh.pooling.answers import check_encoding, embeddings_answer, rerank_answer
from izh.pooling.batcher import Batcher, BatchQueue
from izh.pooling.encoders import PackedEncoder, PaddedEncoder, RemoteEncoder, RemotePooler
from izh.pooling.metrics import PoolingMetrics
from izh.pooling.pool import MODES, pool_hidden, pool_packed
from izh.pooling.recipe import Recipe
from izh.request import Entry

INLINE_CHARACTERS = 4096  # texts up to this long together are tokenized at once: sooner done than handed to a thread


class PoolingService:
    """Vectors of texts, or scores of (query, document) pairs when it has a `score_head`."""

    def __init__(
        self,
        encoder: PaddedEncoder | PackedEncoder | RemotePooler | RemoteEncoder,
        tokenizer: Any,
        model_name: str,
        mode: str = "mean",
        normalize: bool = True,
        score_head: Callable[[Tensor], Tensor] | None = None,
        max_model_len: int = 512,
        max_batch: int = 32,
        pad_id: int = 0,
        *,
        recipe: Recipe | None = None,
        vocab_size: int | None = None,
        score_activation: Callable[[Tensor], Tensor] | None = None,
        max_batch_tokens: int = 2048,
        max_queued_tokens: int = 262_144,
        hold_s: float = 0.0,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """
        `tokenizer.encode(text) -> ids`; to rerank also `encode_pair(query, document) -> ids or (ids, type_ids)`, the
        pair convention that the model was trained on. `score_head(pooled [S, D]) -> [S] or [S, 1]`, which
        `score_activation` turns into scores unless raw ones are asked for. `max_model_len` is in tokens, `max_batch`
        in entries of one call. `recipe`, of a checkpoint, takes the place of `mode` and `normalize`. `vocab_size` None:
        the encoder's. A step computes up to `max_batch_tokens`; at most `max_queued_tokens` wait; a step waits up to
        `hold_s` for company. `prepare` runs once, first, in the computing thread.
        """
        if recipe is None:
            if mode not in MODES:
                raise ValueError(f"mode {mode!r} is not known; choose one of {', '.join(MODES)}")
            recipe = Recipe(modes=(mode,), normalize=normalize)  # type: ignore[arg-type]  # checked above
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.recipe = recipe
        self.score_head = score_head
        self.score_activation = score_activation
        self.max_model_len = max_model_len
        self.max_batch = max_batch
        self.pad_id = pad_id
        self.vocab_size: int | None = vocab_size or getattr(encoder, "vocab_size", None)
        self.metrics = PoolingMetrics().of(model_name)
        """Where this service counts; a server sets that of all its services."""
        queue = BatchQueue(max_batch_tokens, max(max_batch, 256), max_queued_tokens)
        self._batcher = Batcher(self.compute, queue, hold_s, prepare, lambda *batch: self.metrics.batch(*batch))

    def close(self) -> None:
        """End the computing thread."""
        self._batcher.close()

    async def embed(
        self,
        input: Any,
        *,
        encoding_format: str = "float",
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> dict[str, Any]:
        """The answer of /v1/embeddings for a text, a list of texts, token ids, or a list of those. Each is cut to
        `truncate_prompt_tokens` tokens (-1: what the model takes; None: nothing is cut, and what is too long refused).

        Raises: RequestError (400) naming the argument; OverloadedError.
        """
        check_encoding(encoding_format)
        vectors, num_tokens = await self.vectors(
            input, dimensions=dimensions, prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens
        )
        return embeddings_answer(vectors, encoding_format, self.model_name, num_tokens)

    async def vectors(
        self,
        input: Any,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> tuple[Tensor, int]:
        """What `embed` answers, as ([S, D] float32, number of tokens)."""
        with self.metrics.request("embed") as answered:
            given = inputs.check_input(input)
            inputs.check_count("input", len(given), self.max_batch)
            inputs.check_dimensions(dimensions, self.recipe.dimensions)
            size = sum(map(len, given))
            entries = await _beside(size, lambda: self.read(given, prompt_name, truncate_prompt_tokens))
            self.check("input", entries)
            rows = await asyncio.wrap_future(self.submit(entries))
            vectors = self.shortened(torch.stack(rows), dimensions)
            num_tokens = sum(len(entry.ids) for entry in entries)
            answered(len(entries), num_tokens)
        return vectors, num_tokens

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        raw_scores: bool = False,
        return_documents: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> dict[str, Any]:
        """The answer of /v1/rerank: the `top_n` best documents (None: all), best first, ties by index.

        Raises: RequestError (400) naming the argument; OverloadedError.
        """
        query, documents, top_n = inputs.check_rerank(query, documents, top_n)
        scores, num_tokens = await self.scores(
            query, documents, raw_scores=raw_scores, truncate_prompt_tokens=truncate_prompt_tokens
        )
        texts = documents if return_documents else None
        return rerank_answer(scores, texts, top_n, self.model_name, num_tokens)

    async def scores(
        self,
        query: str,
        documents: Sequence[str],
        *,
        raw_scores: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> tuple[list[float], int]:
        """The score of each document for the query, in their order, and the number of tokens."""
        with self.metrics.request("rerank") as answered:
            inputs.check_count("documents", len(documents), self.max_batch)
            size = sum(len(query) + len(document) for document in documents)
            entries = await _beside(size, lambda: self.read_pairs(query, documents, truncate_prompt_tokens))
            self.check("documents", entries)
            raw = await asyncio.wrap_future(self.submit(entries))
            scores = self.activated(raw, raw_scores)
            num_tokens = sum(len(entry.ids) for entry in entries)
            answered(len(entries), num_tokens)
        return scores, num_tokens

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The beginnings of the texts, of at most `max_tokens` tokens each, special ones not counted."""
        cut: Callable[[str, int], str] | None = getattr(self.tokenizer, "cut", None)
        if cut is None:
            raise RequestError(f"the tokenizer of model {self.model_name!r} cannot cut a text", "max_tokens_per_doc")
        return await asyncio.to_thread(lambda: [cut(text, max_tokens) for text in texts])

    # The steps of both, for callers without an event loop (`offline.py`).

    def read(
        self, given: Sequence[Any], prompt_name: str | None = None, truncate_prompt_tokens: int | None = None
    ) -> list[Entry]:
        """Texts, or lists of token ids, as what is computed. Raises: RequestError."""
        prompt = inputs.choose_prompt(self.recipe.prompts, prompt_name, self.recipe.default_prompt_name)
        length = inputs.check_truncation(truncate_prompt_tokens, self.max_model_len)
        if not isinstance(given[0], str):
            return [Entry(ids[:length]) for ids in given]
        texts = [prompt + text for text in given]
        many = getattr(self.tokenizer, "encode_many", None)
        if many is not None:
            entries = [inputs.entry_of(tokens) for tokens in many(texts, length)]
        else:
            self._refuse_truncation(length)
            entries = [inputs.entry_of(self.tokenizer.encode(text)) for text in texts]
        if prompt and not self.recipe.includes_prompt:
            ids = self.tokenizer.encode(prompt)
            skip = len(ids) - (ids[-1] in self.tokenizer.special_ids)  # a closing token is not part of the prompt
            entries = [msgspec.structs.replace(entry, skip=skip) for entry in entries]
        return entries

    def read_pairs(
        self, query: str, documents: Sequence[str], truncate_prompt_tokens: int | None = None
    ) -> list[Entry]:
        """The query with each document, as what is computed. Raises: RequestError, also when this model scores none."""
        if self.score_head is None:
            raise RequestError(f"model {self.model_name!r} has no trained score head, so it cannot rerank", "model")
        if getattr(self.tokenizer, "encode_pair", None) is None:
            raise RequestError(
                f"the tokenizer of model {self.model_name!r} has no encode_pair, the trained way to put a query and a "
                "document together, so it cannot rerank",
                "model",
            )
        length = inputs.check_truncation(truncate_prompt_tokens, self.max_model_len)
        many = getattr(self.tokenizer, "encode_pairs", None)
        if many is not None:
            pairs = many(query, documents, length)
        else:
            self._refuse_truncation(length)
            pairs = [self.tokenizer.encode_pair(query, document) for document in documents]
        return [inputs.entry_of(pair, is_scored=True) for pair in pairs]

    def check(self, param: str, entries: Sequence[Entry], label: Callable[[int], str] | None = None) -> None:
        """Raises: RequestError for an entry that this model cannot take, which `label` names by its index."""
        inputs.check_entries(param, entries, self.max_model_len, self.vocab_size, label)

    def submit(self, entries: Sequence[Entry]) -> "Future[list[Tensor]]":
        """The vectors or raw scores to come, of checked entries. Raises: OverloadedError."""
        if isinstance(self.encoder, RemotePooler):
            return self.encoder.submit(entries, self._finish)
        return self._batcher.submit(entries, [len(entry.ids) for entry in entries])

    def shortened(self, vectors: Tensor, dimensions: int | None) -> Tensor:
        """vectors [S, D] -> [S, dimensions]. Raises: RequestError."""
        inputs.check_dimensions(dimensions, self.recipe.dimensions)
        if dimensions is None or dimensions == vectors.shape[1]:
            return vectors
        if dimensions > vectors.shape[1]:
            raise RequestError(f"dimensions: {dimensions}, but vectors have {vectors.shape[1]} numbers", "dimensions")
        vectors = vectors[:, :dimensions]
        return F.normalize(vectors, dim=-1) if self.recipe.normalize else vectors.contiguous()

    def activated(self, raw: list[Tensor], raw_scores: bool) -> list[float]:
        """Scores as the model's activation makes them, or as they are."""
        scores = torch.stack(raw)
        if self.score_activation is not None and not raw_scores:
            scores = self.score_activation(scores)
        return scores.tolist()

    def _refuse_truncation(self, length: int | None) -> None:
        if length is not None:
            raise RequestError(
                f"the tokenizer of model {self.model_name!r} cannot cut a text", "truncate_prompt_tokens"
            )

    @torch.inference_mode()
    def compute(self, entries: list[Entry]) -> list[Tensor]:
        """One step, in the computing thread: a vector for each entry, or its raw score."""
        if isinstance(self.encoder, RemoteEncoder):
            return self.encoder.compute(entries)
        pooled = self._packed(entries) if isinstance(self.encoder, PackedEncoder) else self._padded(entries)
        return self._finish(pooled, entries)

    @torch.inference_mode()
    def _finish(self, pooled: Tensor, entries: Sequence[Entry]) -> list[Tensor]:
        """What is left to do with pooled rows [S, D]: the recipe's last steps, and the scores of those that ask."""
        for stage in self.recipe.stages:
            pooled = stage(pooled)
        if self.recipe.truncate_dim is not None:
            pooled = pooled[:, : self.recipe.truncate_dim]
        if self.recipe.normalize:
            pooled = F.normalize(pooled, dim=-1)
        results = list(pooled.float().cpu())
        scored = [i for i, entry in enumerate(entries) if entry.is_scored]
        if scored:
            for i, score in zip(scored, self._score(pooled[scored]), strict=True):
                results[i] = score
        return results

    def _score(self, pooled: Tensor) -> Tensor:
        """pooled [N, D] -> [N]."""
        assert self.score_head is not None
        scores = self.score_head(pooled.float())
        if scores.shape not in ((len(pooled),), (len(pooled), 1)):
            raise RequestError(
                f"the score head of model {self.model_name!r} gives {tuple(scores.shape)} for {len(pooled)} pairs; to "
                "rerank it must give one number for each",
                "model",
            )
        return scores.reshape(-1).float().cpu()

    def _packed(self, entries: list[Entry]) -> Tensor:
        starts = torch.tensor([0, *(len(entry.ids) for entry in entries)]).cumsum(0)
        ids = torch.tensor([token for entry in entries for token in entry.ids])
        types = None
        if any(entry.type_ids is not None for entry in entries):
            types = torch.tensor([t for e in entries for t in (e.type_ids or [0] * len(e.ids))])
        assert isinstance(self.encoder, PackedEncoder)
        hidden = self.encoder.packed(ids, starts.to(torch.int32), types)
        return pool_packed(hidden, starts.tolist(), self.recipe.modes, [entry.skip for entry in entries])

    def _padded(self, entries: list[Entry]) -> Tensor:
        longest = max(len(entry.ids) for entry in entries)
        ids = torch.tensor([entry.ids + [self.pad_id] * (longest - len(entry.ids)) for entry in entries])
        lens = torch.tensor([len(entry.ids) for entry in entries])
        mask = (torch.arange(longest) < lens[:, None]).long()
        given = []
        if getattr(self.encoder, "takes_types", False) and entries[0].type_ids is not None:
            given = [torch.tensor([(e.type_ids or []) + [0] * (longest - len(e.type_ids or [])) for e in entries])]
        assert not isinstance(self.encoder, PackedEncoder | RemotePooler | RemoteEncoder)
        hidden = self.encoder(ids, mask, *given)
        if self.recipe.modes in (("mean",), ("last",), ("cls",)) and not any(entry.skip for entry in entries):
            return pool_hidden(hidden, mask.to(hidden.device), self.recipe.modes[0], normalize=False)
        starts = [0, *lens.cumsum(0).tolist()]
        return pool_packed(hidden[mask.to(hidden.device) != 0], starts, self.recipe.modes, [e.skip for e in entries])


async def _beside(num_characters: int, work: Callable[[], list[Entry]]) -> list[Entry]:
    """Run `work` here when it is short, else in a thread."""
    return work() if num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
