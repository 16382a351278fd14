"""Many texts at once with nobody else waiting: what `LLM.embed`, `LLM.rerank` and the command line do.

Owns: the order of the work: all is read and checked before any is computed, then computed in pieces, longest first,
some pieces ahead of the one that is waited for.
Must not know: files, progress bars, HTTP.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from izh.pooling import inputs
from izh.pooling.service import PoolingService
from izh.request import Entry

After = Callable[[int, int], None]
"""Called with the number of texts that are done, and of their tokens."""
Label = Callable[[int], str]
"""How an error names the text of an index."""

_PIECE_TOKENS, _PIECES_AHEAD = 1024, 4  # twice what a step holds, so that none waits for this thread


def embed_all(
    service: PoolingService,
    texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    truncate_prompt_tokens: int | None = None,
    label: Label | None = None,
    after: After = lambda texts, tokens: None,
) -> Tensor:
    """[S, D] float32, in the order of the texts; arguments as `PoolingService.vectors`.

    Raises: RequestError for the first text that cannot be embedded, with none of them computed.
    """
    given = inputs.check_input(texts)
    inputs.check_dimensions(dimensions, service.recipe.dimensions)
    entries = service.read(given, prompt_name, truncate_prompt_tokens)
    service.check("texts", entries, label)
    return service.shortened(torch.stack(_compute(service, entries, after)), dimensions)


def rerank_all(
    service: PoolingService,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    raw_scores: bool = False,
    truncate_prompt_tokens: int | None = None,
    label: Label | None = None,
    after: After = lambda documents, tokens: None,
) -> list[tuple[int, float]]:
    """(index, score) of the `top_n` best documents (None: all), best first, ties by index.

    Raises: RequestError for the first document that cannot be scored, with none of them computed.
    """
    query, documents, top_n = inputs.check_rerank(query, documents, top_n)
    entries = service.read_pairs(query, documents, truncate_prompt_tokens)
    service.check("documents", entries, label)
    scores = service.activated(_compute(service, entries, after), raw_scores)
    return sorted(enumerate(scores), key=lambda each: (-each[1], each[0]))[:top_n]


def _compute(service: PoolingService, entries: Sequence[Entry], after: After) -> list[Tensor]:
    """A result for each entry. Whatever is under way is dropped when an entry fails, or the caller is interrupted."""
    results: list[Any] = [None] * len(entries)
    ahead: deque[tuple[list[int], Future[list[Tensor]]]] = deque()

    def collect() -> None:
        piece, future = ahead[0]
        for index, result in zip(piece, future.result(), strict=True):
            results[index] = result
        ahead.popleft()
        after(len(piece), sum(len(entries[index].ids) for index in piece))

    try:
        for piece in _pieces(entries):
            if len(ahead) == _PIECES_AHEAD:
                collect()
            ahead.append((piece, service.submit([entries[index] for index in piece])))
        while ahead:
            collect()
    finally:
        for _, future in ahead:
            future.cancel()
    return results


def _pieces(entries: Sequence[Entry]) -> Iterator[list[int]]:
    """Indices, longest first: neighbours of one length waste least where an encoder pads."""
    piece: list[int] = []
    num_tokens = 0
    for index in sorted(range(len(entries)), key=lambda i: -len(entries[i].ids)):
        piece.append(index)
        num_tokens += len(entries[index].ids)
        if num_tokens >= _PIECE_TOKENS:
            yield piece
            piece, num_tokens = [], 0
    if piece:
        yield piece
