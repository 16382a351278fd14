"""How well questions find their pages: by the embedder alone, and with a reranker over what it found.

Owns: the embedding, the search, and the judging, all by the services that izh serves.
Must not know: training.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Page
from torch import Tensor

from izh.pooling import load_embedder, load_reranker

FOUND = 10
"""Passages of the embedder that are reranked."""
BEST = 10  # MRR@10: a right passage further down counts 0
SHARE = 20.0
"""What a cosine of 1 adds to the reranker's logit in `both`: what it counts at first in the reranker itself."""
_PIECE = 256  # texts embedded in one call


@dataclass(frozen=True)
class Figures:
    """MRR@10 over the questions of one kind. `both`: ordered by the sum of reranker and embedder. `error` is the
    standard error of what the reranker gains, question by question."""

    kind: str
    num_questions: int
    embedder: float
    reranked: float
    both: float
    error: float


def vectors(texts: Sequence[str]) -> Tensor:
    """[S, D] of the demo embedder, each of length 1."""
    service = load_embedder("demo")

    async def embed() -> Tensor:
        pieces = [texts[start : start + _PIECE] for start in range(0, len(texts), _PIECE)]
        return torch.cat([(await service.vectors(piece, truncate_prompt_tokens=-1))[0] for piece in pieces])

    try:
        return asyncio.run(embed())
    finally:
        service.close()


def search(queries: Tensor, passages: Tensor, most: int) -> Tensor:
    """queries [N, D], passages [M, D] -> [N, most]: the nearest passages of each, best first."""
    return (queries @ passages.T).topk(most).indices


def judge(held_out: Sequence[Page], directory: Path) -> list[Figures]:
    """The held-out questions, each looked for among all held-out passages; those of unseen packages counted apart."""
    embedded = vectors([*(page.query for page in held_out), *(page.passage for page in held_out)])
    queries, passages = embedded.split(len(held_out))
    found = search(queries, passages, FOUND)
    cosines = (queries @ passages.T).gather(1, found)
    scores = rerank(held_out, found, directory)
    right = found == torch.arange(len(held_out))[:, None]
    every = [reciprocal_ranks(each, right) for each in (cosines, scores, scores + SHARE * cosines)]
    kinds = (("pages of the packages trained on", "held_out"), ("packages not trained on", "unseen_packages"))
    made = []
    for kind, split in kinds:
        own = torch.tensor([page.split == split for page in held_out])
        num_questions = int(own.sum())
        error = (every[1] - every[0])[own].std().item() / num_questions**0.5
        made.append(Figures(kind, num_questions, *(ranks[own].mean().item() for ranks in every), error))
    return made


def rerank(pages: Sequence[Page], found: Tensor, directory: Path) -> Tensor:
    """Raw scores [N, K] of each page's question with the passages found for it."""
    service = load_reranker(directory)

    async def score() -> list[list[float]]:
        made = []
        for page, row in zip(pages, found.tolist(), strict=True):
            documents = [pages[index].passage for index in row]
            made.append((await service.scores(page.query, documents, raw_scores=True, truncate_prompt_tokens=-1))[0])
        return made

    try:
        return torch.tensor(asyncio.run(score()))
    finally:
        service.close()


def reciprocal_ranks(scores: Tensor, right: Tensor) -> Tensor:
    """scores [N, K], right [N, K] with at most one true in a row -> [N]: 1 / its rank, 0 beyond `BEST` or if absent."""
    own = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
    ranks = (scores > own).sum(1) + 1
    return torch.where(right.any(1) & (ranks <= BEST), 1 / ranks, 0.0)


def table(figures: Sequence[Figures]) -> str:
    """As Markdown."""
    lines = [
        f"| questions about | number | embedder alone | its {FOUND} best reranked | gain, its error | both scores |",
        "|---|---|---|---|---|---|",
    ]
    for each in figures:
        gain = f"{each.reranked - each.embedder:+.3f} ± {each.error:.3f}"
        values = f"{each.embedder:.3f} | {each.reranked:.3f} | {gain} | {each.both:.3f}"
        lines.append(f"| {each.kind} | {each.num_questions} | {values} |")
    return "\n".join(lines)
