"""`izh bench images`: time to the first token of a prompt with an image, new and seen before, beside transformers.

Owns: the load, how it is timed, and the table.
Must not know: how an engine is asked (`seeing_contestants.py`), or what it does with an image.

A prompt is one JPEG and a short question; izh gets it as clients send it, in a data URI over HTTP. All requests of a
batch are sent at once. Seconds run until the last of them has its first token:

    first          images that nobody has sent before
    again          the same files once more, each with a question of another wording, so that the answer is new
    transformers   the same files and questions through its own processor and one padded `generate`; it keeps nothing of
                   an image, so its time is of every time

Without a checkpoint to measure the command writes a random one (`seeing.py`).
"""

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

from izh.bench.document import caption, document, label, write
from izh.bench.options import ImagesOptions, at_least_one
from izh.bench.seeing import MEASURED, SeeingShape, photograph, write_checkpoint
from izh.bench.seeing_contestants import Counts, Peer, answer, counts
from izh.bench.timing import check_batches, explicit
from izh.config import EngineOptions, ServerOptions
from izh.engine.async_llm import AsyncLLM
from izh.errors import OptionError
from izh.model.source import resolve
from izh.multimodal.vlm.model import is_vision_model
from izh.server.app import Server

_FIRST, _AGAIN = "What is in this picture?", "Say what this picture is."
"""Equally long, and different from the first word on."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One engine at one batch size. Times (the medians) in seconds; None for what was not asked of it."""

    engine: str
    batch: int
    first_s: float
    again_s: float | None
    spread: float
    """How much longer the slowest repeat took than the fastest, as a share of the fastest: the larger of the two."""
    hits: float | None
    """Share of the images sent again that were found."""
    cache_bytes: int | None
    """Of encoded images, held when the batch size was done."""
    same_tokens: float | None
    """Share of the first tokens that are the peer's."""


@dataclass(slots=True)
class Seen:
    """What was measured of one engine at one batch size."""

    firsts_s: list[float]
    agains_s: list[float]
    tokens: list[bytes]


def report(engine: EngineOptions, options: ImagesOptions, shape: SeeingShape = MEASURED) -> int:
    """Measure, print a table, write the JSON file if asked. Returns the exit status."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would write across the benchmark's own
    check(engine, options)
    engine = explicit(engine)
    makes_one = engine.model == EngineOptions().model
    with tempfile.TemporaryDirectory(prefix="izh-bench-images-") if makes_one else nullcontext("") as folder:
        if makes_one:
            write_checkpoint(Path(folder), shape)
            engine = replace(engine, model=folder, served_model_name=shape.title)
        source = resolve(engine.model, engine.revision)
        if source.kind == "gguf" or not is_vision_model(source.path):
            raise OptionError(f"--model {engine.model}: takes no images; give the directory of a model that does")
        engine = replace(engine, model=str(source.path))
        figures = asyncio.run(measure(engine, options))
    written = document(engine, engine.served_model_name or source.name, options, figures)
    Console().print(table(figures, written))
    write(written, options.json)
    return 0


def check(engine: EngineOptions, options: ImagesOptions) -> None:
    """Raises OptionError for what cannot be measured."""
    at_least_one(options, "width", "height", "repeats")
    check_batches(engine, options.batch)


async def measure(engine: EngineOptions, options: ImagesOptions) -> list[Figure]:
    """All batch sizes, the engines' turns interleaved."""
    llm = AsyncLLM(engine)
    server = Server(llm, ServerOptions(port=0))
    found: list[Figure] = []
    seed = 0

    def photographs(count: int) -> list[bytes]:
        nonlocal seed
        seed += count
        return [photograph(each, options.width, options.height) for each in range(seed - count, seed)]

    console = Console(stderr=True)
    url = await server.start()
    try:
        if engine.num_threads is not None:
            torch.set_num_threads(engine.num_threads)  # the peer's; izh's engine has a process of its own
        peer = Peer(Path(engine.model), engine) if options.peer else None
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            await answer(client, photographs(1), _FIRST)  # kernels are compiled, memory is touched
            for batch in options.batch:
                with console.status(f"measuring batch {batch}"):
                    ours, theirs = Seen([], [], []), Seen([], [], [])
                    before = await counts(client)
                    for _ in range(options.repeats):
                        sent = photographs(batch)
                        seconds, pieces = await answer(client, sent, _FIRST)
                        ours.firsts_s.append(seconds)
                        ours.tokens += pieces
                        ours.agains_s.append((await answer(client, sent, _AGAIN))[0])
                        if peer is not None:
                            seconds, tokens = peer.answer(sent, _FIRST)
                            theirs.firsts_s.append(seconds)
                            theirs.tokens += [llm.tokenizer.piece(token)[1] for token in tokens]
                    found += figures_of(batch, ours, theirs, before, await counts(client))
    finally:
        await server.stop()
    return found


def figures_of(batch: int, ours: Seen, theirs: Seen, before: Counts, after: Counts) -> list[Figure]:
    """Medians, and what the server's counts came to over the batch size's requests, half of them with known images."""
    num_images = batch * len(ours.agains_s)
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)) / num_images if theirs.tokens else None
    figures = [
        Figure(
            engine="izh",
            batch=batch,
            first_s=statistics.median(ours.firsts_s),
            again_s=statistics.median(ours.agains_s),
            spread=max(max(each) / min(each) for each in (ours.firsts_s, ours.agains_s)) - 1,
            hits=(after["mm_cache_hits_total"] - before["mm_cache_hits_total"]) / num_images,
            cache_bytes=int(after["mm_cache_bytes"]),
            same_tokens=same,
        )
    ]
    if theirs.firsts_s:
        figures.append(
            Figure(
                engine=Peer.name,
                batch=batch,
                first_s=statistics.median(theirs.firsts_s),
                again_s=None,
                spread=max(theirs.firsts_s) / min(theirs.firsts_s) - 1,
                hits=None,
                cache_bytes=None,
                same_tokens=None,
            )
        )
    return figures


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """One row for each engine at each batch size; the share says what of the first time the second one is."""
    options = document["options"]
    title = (
        f"{document['model']}, {document['dtype']}\nrequests of one JPEG of {options['width']} x {options['height']} "
        "and a question, time to the last first token"
    )
    out = Table(title=title, caption=caption(figures, document))
    out.add_column("batch", justify="right")
    out.add_column("engine", no_wrap=True)
    for heading in ("first", "again", "share", "hits", "MiB held", "same tokens"):
        out.add_column(heading, justify="right")
    for batch in dict.fromkeys(figure.batch for figure in figures):
        for each in (figure for figure in figures if figure.batch == batch):
            cells = [_ms(each.first_s), "", "", "", "", ""]
            if each.again_s is not None and each.hits is not None and each.cache_bytes is not None:
                held = f"{each.cache_bytes / 2**20:.1f}"
                cells[1:5] = _ms(each.again_s), f"{each.again_s / each.first_s:.1%}", f"{each.hits:.0%}", held
            if each.same_tokens is not None:
                cells[5] = f"{each.same_tokens:.0%}"
            out.add_row(str(batch) if each.engine == "izh" else "", label(each), *cells)
        out.add_section()
    return out


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
