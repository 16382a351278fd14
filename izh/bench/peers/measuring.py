"""A section's engines started, asked in turns, and compared; those that cannot be are left out by name.

Owns: figures of text and of embeddings, LeftOut. How turns are timed: `bench/timing.py`.
Must not know: environments, forms of models, files.
Invariant: an engine that fails is measured no further; what the others do is then measured anew, without it.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from izh.bench.peers.remote import PeerError, Remote
from izh.bench.peers.sections import Entry, Group
from izh.bench.timing import PromptSource, Rates, agreement, measure
from izh.errors import OptionError

Start = Callable[[Entry], Remote]
Found = TypeVar("Found")

NUM_TEXTS, MIN_WORDS, MAX_WORDS = 256, 6, 80


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """An engine without a figure, in the whole section or (numbers given) in a part of it."""

    engine: str
    why: str
    batch: int | None = None
    prompt_tokens: int | None = None
    adapters: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextFigure(Rates):
    """One engine on one cell."""

    prompt_tokens: int
    adapters: int
    agreement: float | None
    """Share of tokens that equal the reference's; None when that has none."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingFigure:
    """One engine on `NUM_TEXTS` texts a call: the medians of both rates; `spread` as in Rates, of the rate in tokens.
    `agreement` is the mean cosine with the reference's vectors."""

    engine: str
    tokens_per_s: float
    texts_per_s: float
    spread: float
    agreement: float | None


class Texts:
    """Random texts of `MIN_WORDS` to `MAX_WORDS` words of the embedder's vocabulary, and their lengths in tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: of the tokenizers library; it must not cut or pad."""
        self._tokenizer = tokenizer
        words = (word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and word.islower())
        self._words = sorted(word for word in words if len(word) > 2)
        self._random = random.Random(0)

    def take(self) -> tuple[list[str], int]:
        """Texts never given out before, and their tokens all together, special ones included."""
        lengths = [self._random.randint(MIN_WORDS, MAX_WORDS) for _ in range(NUM_TEXTS)]
        texts = [" ".join(self._random.choices(self._words, k=length)) for length in lengths]
        return texts, sum(len(encoding.ids) for encoding in self._tokenizer.encode_batch(texts))


class Turns:
    """One section's measuring: what was found, and who was left out."""

    def __init__(self, reference: str, repeats: int, after_call: Callable[[], None]) -> None:
        self.figures: list[Any] = []
        self.left_out: list[LeftOut] = []
        self._reference = reference
        self._repeats = repeats
        self._after_call = after_call

    def text(
        self,
        group: Group,
        entries: Sequence[Entry],
        start: Start,
        prompts: Callable[[int], PromptSource],
        num_tokens: int,
    ) -> None:
        """All cells of a group; `prompts` gives those of a length."""
        with ExitStack() as stack:
            remotes = self._started(stack, entries, start, adapters=group.adapters)
            for batch, length in group.cells:
                where = {"batch": batch, "prompt_tokens": length, "adapters": group.adapters}
                attempt = partial(
                    measure,
                    prompts=prompts(length),
                    batch=batch,
                    num_tokens=num_tokens,
                    repeats=self._repeats,
                    after_call=self._after_call,
                )
                measured = self._of_those_left(remotes, where, attempt)
                answers = {rates.engine: tokens for rates, tokens in measured or []}
                reference = answers.get(self._reference)
                for rates, tokens in measured or []:
                    same = None if reference is None else agreement(reference, tokens)
                    self.figures.append(
                        TextFigure(**asdict(rates), prompt_tokens=length, adapters=group.adapters, agreement=same)
                    )

    def embeddings(self, entries: Sequence[Entry], start: Start, texts: Texts) -> None:
        """All engines on the same texts."""
        with ExitStack() as stack:
            remotes = self._started(stack, entries, start)
            self.figures += self._of_those_left(remotes, {}, lambda left: self._embedded(left, texts)) or []

    def _embedded(self, remotes: Sequence[Remote], texts: Texts) -> list[EmbeddingFigure]:
        warm_up, _ = texts.take()
        for remote in remotes:
            remote.embed(warm_up)
            self._after_call()
        tokens_per_s: dict[str, list[float]] = {remote.name: [] for remote in remotes}
        texts_per_s: dict[str, list[float]] = {remote.name: [] for remote in remotes}
        vectors: dict[str, list[np.ndarray]] = {remote.name: [] for remote in remotes}
        for repeat in range(self._repeats):
            asked, num_tokens = texts.take()
            for remote in remotes if repeat % 2 == 0 else remotes[::-1]:
                begin = time.perf_counter()
                vectors[remote.name].append(remote.embed(asked))
                seconds = time.perf_counter() - begin
                tokens_per_s[remote.name].append(num_tokens / seconds)
                texts_per_s[remote.name].append(len(asked) / seconds)
                self._after_call()
        reference = vectors.get(self._reference)
        return [
            EmbeddingFigure(
                engine=name,
                tokens_per_s=statistics.median(rates),
                texts_per_s=statistics.median(texts_per_s[name]),
                spread=max(rates) / min(rates) - 1,
                agreement=None if reference is None else cosine(reference, vectors[name]),
            )
            for name, rates in tokens_per_s.items()
        ]

    def _started(
        self, stack: ExitStack, entries: Sequence[Entry], start: Start, adapters: int | None = None
    ) -> list[Remote]:
        remotes = []
        for entry in entries:
            try:
                remotes.append(stack.enter_context(closing(start(entry))))
            except (PeerError, OptionError) as error:
                why = error.why if isinstance(error, PeerError) else str(error)
                self.left_out.append(LeftOut(engine=entry.label, why=why, adapters=adapters))
        return remotes

    def _of_those_left(
        self, remotes: list[Remote], where: dict[str, int], attempt: Callable[[Sequence[Remote]], Found]
    ) -> Found | None:
        """What an attempt finds in which none fails; the failing ones leave `remotes`."""
        while remotes:
            try:
                return attempt(remotes)
            except PeerError as error:
                remotes.remove(error.remote)
                self.left_out.append(LeftOut(engine=error.remote.name, why=error.why, **where))
        return None


def cosine(reference: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> float:
    """Mean cosine of the rows of arrays [N, D]."""
    a, b = np.concatenate(reference), np.concatenate(vectors)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / lengths).mean())
