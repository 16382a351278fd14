"""`izh bench rerank`: scores of many documents for one query, beside sentence-transformers' CrossEncoder.

Owns: the work and the table. Must not know: how either engine works.

Each engine is asked for all documents in one call, tokenizing included, on the same weights in float32, with as many
threads, in turns; the scores are compared.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from izh.bench.document import caption, document, label, write
from izh.bench.options import RerankBenchOptions, at_least_one
from izh.bench.pooling import Speed, take_turns, threads_of, why_no_sentence_transformers
from izh.bench.texts import MIXED, SHORT, TextShape
from izh.bench.timing import explicit
from izh.config import EngineOptions
from izh.model.demo_embedder import demo_embedder_directory
from izh.pooling import load_reranker
from izh.pooling.offline import rerank_all
from izh.pooling.service import PoolingService

Score = Callable[[str, Sequence[str]], list[float]]

PEER = "CrossEncoder"
RANDOM_NAME = "all-MiniLM-L6-v2 with a random head"


@dataclass(frozen=True, kw_only=True)
class Figure(Speed):
    """One engine's rates, in pairs of query and document, and in tokens, per second."""

    texts: str
    pairs: float
    tokens: float
    difference: float
    """Largest difference of a score from izh's."""


def report(options: RerankBenchOptions) -> int:
    """Measure, print a table, write the JSON file if asked. Returns the exit status."""
    from transformers.utils import logging

    at_least_one(options, "documents", "repeats")
    num_threads = threads_of(options.num_threads)
    torch.set_num_threads(num_threads)
    left_out = why_no_sentence_transformers(options.peer)
    logging.disable_progress_bar()  # it would write across the benchmark's own
    logging.set_verbosity_error()  # that a head is random is meant
    with tempfile.TemporaryDirectory(prefix="izh-bench-rerank-") as made:
        folder = write_reranker(Path(made)) if options.reranker is None else Path(options.reranker).expanduser()
        name = RANDOM_NAME if options.reranker is None else folder.resolve().name
        service = load_reranker(folder, model_name=name, num_threads=num_threads)
        peer = None if left_out is not None else cross_encoder(folder)
        found: list[Figure] = []
        for shape in (SHORT, MIXED):
            with Console(stderr=True).status(f"measuring {shape.title} documents"):
                found += measure(service, peer, shape, options)
        service.close()
    written = document(explicit(EngineOptions(device="cpu")), name, options, found)
    written["left_out"] = {} if left_out is None else {PEER: left_out}
    Console().print(table(found, written))
    write(written, options.json)
    return 0


def write_reranker(folder: Path) -> Path:
    """A cross-encoder that any library can load, of the most used one's size. Its scores mean nothing."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    embedder = demo_embedder_directory()
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(embedder, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedder).save_pretrained(folder)
    return folder


def measure(service: PoolingService, peer: Score | None, shape: TextShape, options: RerankBenchOptions) -> list[Figure]:
    """All documents in one call; what is too long is cut, as the peer does."""
    (query,), documents = SHORT.take(1, seed=1), shape.take(options.documents)
    contestants: dict[str, Callable[[], list[float]]] = {
        "izh": lambda: [score for _, score in sorted(rerank_all(service, query, documents, truncate_prompt_tokens=-1))]
    }
    if peer is not None:
        contestants[PEER] = lambda: peer(query, documents)
    timed = take_turns(contestants, options.repeats)
    num_tokens = sum(len(entry.ids) for entry in service.read_pairs(query, documents, -1))
    expected = timed[0][1][0]
    return [
        figure(speed, shape, len(documents), num_tokens, difference(expected, answers[0])) for speed, answers in timed
    ]


def cross_encoder(folder: Path) -> Score:
    """Its `predict`, in batches of 32, as it makes them when nothing else is asked."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu")

    def predict(query: str, documents: Sequence[str]) -> list[float]:
        scores: list[float] = model.predict([(query, each) for each in documents], show_progress_bar=False).tolist()
        return scores

    return predict


def figure(speed: Speed, shape: TextShape, num_pairs: int, num_tokens: int, difference: float) -> Figure:
    """Rates of so much work."""
    return Figure(
        **asdict(speed),
        texts=shape.title,
        pairs=num_pairs / speed.seconds,
        tokens=num_tokens / speed.seconds,
        difference=difference,
    )


def difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest of a score."""
    return max(abs(a - b) for a, b in zip(expected, found, strict=True))


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """The figures under each other; the ratio says how many times the peer's rate izh reaches."""
    lines = [f"{name} left out ({why})" for name, why in document["left_out"].items()]
    out = Table(
        title=f"{document['model']} {document['dtype']}, {document['options']['documents']} documents for a query",
        caption=escape("\n".join([*lines, caption(figures, document)])),
    )
    out.add_column("documents")
    out.add_column("engine", no_wrap=True)
    for heading in ("pairs/s", "tokens/s", "ratio", "largest\ndifference"):
        out.add_column(heading, justify="right")
    for texts in dict.fromkeys(each.texts for each in figures):
        ours, *peers = [each for each in figures if each.texts == texts]
        out.add_row(texts, label(ours), f"{ours.pairs:.0f}", f"{ours.tokens:.0f}", "", "")
        for peer in peers:
            ratio = f"{ours.pairs / peer.pairs:.2f}"
            out.add_row("", label(peer), f"{peer.pairs:.0f}", f"{peer.tokens:.0f}", ratio, f"{peer.difference:.0e}")
        if not peers:
            out.add_row("", PEER, *["-"] * 4)
        out.add_section()
    return out
