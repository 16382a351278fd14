"""`izh bench embed`: vectors of sentences, offline beside sentence-transformers, over HTTP beside Infinity.

Owns: which engines do which work, and the tables. Must not know: how any engine works.

Offline each engine is asked for all sentences in one call, tokenizing included. Over HTTP each server has a process of
its own and answers `clients` clients that send one sentence at a time; izh's is `izh serve`, with a model for text that
nobody asks. All run on the same weights in float32, with as many threads, in turns; every vector is compared with izh's
offline one. A peer that is not there is a row of the table that says how to get it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from izh.bench.clients import Load, ask_all
from izh.bench.document import caption, document, label, write
from izh.bench.options import EmbedBenchOptions, at_least_one
from izh.bench.pooling import (
    SENTENCE_TRANSFORMERS,
    Speed,
    quantile,
    take_turns,
    threads_of,
    why_no_sentence_transformers,
)
from izh.bench.served import INFINITY_NAME, find_infinity, infinity_server, izh_server
from izh.bench.texts import MIXED, SHORT, TextShape
from izh.bench.timing import explicit
from izh.config import EngineOptions, ServerOptions
from izh.model.demo_embedder import demo_embedder_directory
from izh.pooling import load_embedder
from izh.pooling.offline import embed_all
from izh.pooling.service import PoolingService

Vectors = np.ndarray[Any, np.dtype[np.float32]]
Embed = Callable[[Sequence[str]], Vectors]

PEER_OF = {"offline": SENTENCE_TRANSFORMERS, "HTTP": "Infinity"}
_PATHS = {"izh": "/v1/embeddings", "Infinity": "/embeddings"}


@dataclass(frozen=True, kw_only=True)
class Figure(Speed):
    """One engine's rates, in sentences and tokens per second; over HTTP also what its clients waited, in seconds."""

    way: str
    texts: str
    sentences: float
    tokens: float
    difference: float
    """Largest difference of a number of a vector from izh's offline one."""
    p50_s: float | None = None
    p99_s: float | None = None


def report(engine: EngineOptions, options: EmbedBenchOptions) -> int:
    """Measure, print two tables, write the JSON file if asked. Returns the exit status."""
    at_least_one(options, "sentences", "requests", "clients", "repeats")
    engine = explicit(engine)
    num_threads = threads_of(engine.num_threads)
    torch.set_num_threads(num_threads)
    is_demo = options.embedder == "demo"
    folder = demo_embedder_directory() if is_demo else Path(options.embedder).expanduser()
    no_transformers = why_no_sentence_transformers(options.peer)
    infinity, no_infinity = find_infinity(options.infinity) if options.peer else (None, "--no-peer")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Nothing is drawn while the clock runs: the bar is refreshed by hand, between calls.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:

        def steps(title: str, num_engines: int) -> Callable[[], None]:
            task = bar.add_task(title, total=(1 + options.repeats) * num_engines)
            return lambda: bar.update(task, advance=1, refresh=True)

        service = load_embedder(folder, num_threads=num_threads, quantization=engine.quantization)
        contestants: dict[str, Embed] = {"izh": partial(embed_cut, service)}
        if no_transformers is None:
            contestants[SENTENCE_TRANSFORMERS] = sentence_transformer(folder, service.recipe.normalize)
        found: list[Figure] = []
        for shape in (SHORT, MIXED):
            found += offline(service, contestants, shape, options, steps(f"offline, {shape.title}", len(contestants)))
        if options.http:
            engine = replace(engine, num_threads=num_threads)
            after = steps("HTTP", 1 if infinity is None else 2)
            found += over_http(service, engine, folder, options, infinity, after)
        service.close()
    left_out = {SENTENCE_TRANSFORMERS: no_transformers, "Infinity": no_infinity}
    written = document(engine, "all-MiniLM-L6-v2" if is_demo else folder.resolve().name, options, found)
    written["left_out"] = {name: why for name, why in left_out.items() if why is not None}
    for way in ("offline", "HTTP") if options.http else ("offline",):
        Console().print(table([figure for figure in found if figure.way == way], written))
    write(written, options.json)
    return 0


def embed_cut(service: PoolingService, texts: Sequence[str]) -> Vectors:
    """izh's vectors; what is too long is cut, as the peers do."""
    return embed_all(service, texts, truncate_prompt_tokens=-1).numpy()


def sentence_transformer(folder: Path, normalize: bool) -> Embed:
    """Its `encode`, in batches of 32, as it makes them when nothing else is asked."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would write across the benchmark's own
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(texts, show_progress_bar=False, normalize_embeddings=normalize)


def offline(
    service: PoolingService,
    contestants: Mapping[str, Embed],
    shape: TextShape,
    options: EmbedBenchOptions,
    after: Callable[[], None],
) -> list[Figure]:
    """All sentences in one call."""
    texts = shape.take(options.sentences)
    calls = {name: partial(embed, texts) for name, embed in contestants.items()}
    timed = take_turns(calls, options.repeats, after)
    num_tokens, expected = count_tokens(service, texts), timed[0][1][0]
    return [
        figure(speed, "offline", shape.title, len(texts), num_tokens, difference(expected, answers[0]))
        for speed, answers in timed
    ]


def over_http(
    service: PoolingService,
    engine: EngineOptions,
    folder: Path,
    options: EmbedBenchOptions,
    infinity: str | None,
    after: Callable[[], None],
) -> list[Figure]:
    """One sentence a request, many clients."""
    texts = MIXED.take(options.requests, seed=1)
    expected = embed_cut(service, texts)
    bodies = {
        name: [json.dumps(body | {"input": text}).encode() for text in texts]
        for name, body in (("izh", {"truncate_prompt_tokens": -1}), ("Infinity", {"model": INFINITY_NAME}))
    }
    with ExitStack() as servers:
        urls = {"izh": servers.enter_context(izh_server(engine, ServerOptions(port=0, embedder=str(folder))))}
        if infinity is not None:
            urls["Infinity"] = servers.enter_context(infinity_server(infinity, folder, threads_of(engine.num_threads)))
        calls = {name: partial(ask_all, url, _PATHS[name], bodies[name], options.clients) for name, url in urls.items()}
        timed = take_turns(calls, options.repeats, after)
    found, num_tokens = [], count_tokens(service, texts)
    for speed, loads in timed:
        waits_s = [wait_s for load in loads[1:] for wait_s in load.latencies_s]
        made = figure(speed, "HTTP", MIXED.title, len(texts), num_tokens, difference(expected, vectors(loads[-1])))
        found.append(replace(made, p50_s=quantile(waits_s, 0.5), p99_s=quantile(waits_s, 0.99)))
    return found


def figure(speed: Speed, way: str, texts: str, num_texts: int, num_tokens: int, difference: float) -> Figure:
    """Rates of so much work."""
    return Figure(
        **asdict(speed),
        way=way,
        texts=texts,
        sentences=num_texts / speed.seconds,
        tokens=num_tokens / speed.seconds,
        difference=difference,
    )


def count_tokens(service: PoolingService, texts: Sequence[str]) -> int:
    """Special ones included."""
    return sum(len(entry.ids) for entry in service.read(texts, truncate_prompt_tokens=-1))


def vectors(load: Load) -> Vectors:
    """The vectors in the answers of a server."""
    return np.array([json.loads(answer)["data"][0]["embedding"] for answer in load.answers], dtype=np.float32)


def difference(expected: Vectors, found: Vectors) -> float:
    """The largest of a number."""
    return float(np.abs(expected - found).max())


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """One way's figures; a ratio says how many times the peer's rate izh reaches."""
    options, way = document["options"], figures[0].way
    what = (
        f"{options['sentences']} sentences in one call"
        if way == "offline"
        else f"{options['clients']} clients, one sentence a request"
    )
    lines = [f"{name} left out ({why})" for name, why in document["left_out"].items() if PEER_OF[way] == name]
    out = Table(
        title=f"{document['model']} {document['dtype']}, {way}: {what}",
        caption=escape("\n".join([*lines, caption(figures, document)])),
    )
    out.add_column("texts")
    out.add_column("engine", no_wrap=True)
    headings = ("sentences\n/s", "tokens\n/s", "ratio", "largest\ndifference")
    for heading in headings if way == "offline" else (*headings, "p50", "p99"):
        out.add_column(heading, justify="right")
    for texts in dict.fromkeys(each.texts for each in figures):
        ours, *peers = [each for each in figures if each.texts == texts]
        for each in (ours, *peers):
            ratio = "" if each is ours else f"{ours.sentences / each.sentences:.2f}"
            apart = "" if each is ours and way == "offline" else f"{each.difference:.0e}"
            cells = [f"{each.sentences:.0f}", f"{each.tokens:.0f}", ratio, apart]
            cells += [f"{1000 * each_s:.0f} ms" for each_s in (each.p50_s, each.p99_s) if each_s is not None]
            out.add_row(texts if each is ours else "", label(each), *cells)
        if PEER_OF[way] in document["left_out"]:
            out.add_row("", PEER_OF[way], *["-"] * (len(out.columns) - 2))
        out.add_section()
    return out
