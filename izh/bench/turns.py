"""`izh bench turns`: more adapters than slots, beside as many as slots in the same run.

Owns: the load, and what is made of its times. Must not know: how adapters take turns.

For each number of adapters an engine process of its own with `--max-loras` slots answers `requests` streamed requests,
`clients` of them at a time: each client asks, reads to the end, and asks again, every time with another adapter, so
that all are wanted all the time. Answers have half to one and a half times `output_tokens` tokens, or all would end at
once. Prompts are random tokens, never used twice. First tokens are timed from the call on, the gaps between later
ones as the client sees them.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from izh.bench import timing
from izh.bench.adapters import refuse_others, write_adapters
from izh.bench.document import document, write
from izh.bench.options import TurnsOptions, at_least_one
from izh.bench.shapes import SHAPES
from izh.bench.timing import PromptSource, explicit
from izh.config import EngineOptions
from izh.engine.async_llm import AsyncLLM
from izh.model.load import load_spec
from izh.model.source import resolve
from izh.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of adapters. Rate in tokens/s, times in seconds."""

    adapters: int
    slots: int
    output: float
    """Tokens of answers per second, over the whole run."""
    first_median_s: float
    first_p90_s: float
    gap_median_s: float
    gap_p99_s: float


@dataclass(frozen=True, slots=True)
class Answers:
    """What the clients saw of one load: tokens of answers per second, and seconds."""

    output: float
    firsts_s: list[float]
    gaps_s: list[float]


def report(engine: EngineOptions, options: TurnsOptions) -> int:
    """Measure, print a table, write the JSON file if asked. Returns the exit status."""
    check(engine, options)
    source = resolve(engine.model, engine.revision)
    engine = replace(explicit(engine), model=str(source.path))
    counts, shape = tuple(dict.fromkeys(options.adapters)), SHAPES[options.shape]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    loads: dict[int, list[Answers]] = {count: [] for count in counts}
    with (
        tempfile.TemporaryDirectory(prefix="izh-bench-turns-") as folder,
        Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=1) as bar,
    ):
        directories = list(write_adapters(Path(folder), load_spec(source), shape, max(counts)))
        task = bar.add_task("", total=options.repeats * len(counts) * options.requests)
        for repeat in range(options.repeats):
            for count in counts if repeat % 2 == 0 else counts[::-1]:
                bar.update(task, description=f"{count} adapters in {options.slots} slots")
                load = Load(engine, options, directories[:count], lambda: bar.update(task, advance=1))
                loads[count].append(asyncio.run(load.run()))
    found = [figure(count, options.slots, each) for count, each in loads.items()]
    written = document(engine, source.name, options, found)
    Console().print(table(found, written))
    write(written, options.json)
    return 0


def check(engine: EngineOptions, options: TurnsOptions) -> None:
    """Raises OptionError for what cannot be measured."""
    timing.check(engine, options, [1])
    at_least_one(options, "requests", "slots", "clients", "adapters")
    refuse_others(engine)


class Load:
    """Clients that keep one engine busy with all of its adapters."""

    def __init__(
        self, engine: EngineOptions, options: TurnsOptions, directories: Sequence[Path], after: Callable[[], None]
    ) -> None:
        self._options = options
        self._names = [f"adapter-{index}" for index in range(len(directories))]
        lora = tuple(f"{name}={directory}" for name, directory in zip(self._names, directories, strict=True))
        rank = SHAPES[options.shape].rank
        self._llm = AsyncLLM(replace(engine, lora=lora, max_loras=options.slots, max_lora_rank=rank))
        self._after = after
        self._next = 0

    async def run(self) -> Answers:
        """Start the engine, warm it up, measure, stop it."""
        await self._llm.start()
        try:
            tokenizer, options = self._llm.tokenizer, self._options
            self._prompts = PromptSource(tokenizer.vocab_size, tokenizer.special_ids, options.prompt_tokens)
            await asyncio.gather(*(self._ask(index) for index in range(min(len(self._names), options.clients))))
            seen = Answers(0.0, [], [])
            start = time.perf_counter()
            await asyncio.gather(*(self._client(seen) for _ in range(options.clients)))
            seconds = time.perf_counter() - start
        finally:
            await self._llm.shutdown()
        return replace(seen, output=(len(seen.firsts_s) + len(seen.gaps_s)) / seconds)

    async def _client(self, seen: Answers) -> None:
        while self._next < self._options.requests:
            self._next += 1
            first, *gaps = await self._ask(self._next)
            seen.firsts_s.append(first)
            seen.gaps_s.extend(gaps)
            self._after()

    async def _ask(self, index: int) -> list[float]:
        """One answer, by adapter index mod their number; the seconds to each of its tokens."""
        (prompt,) = self._prompts.take(1)
        mean = self._options.output_tokens
        num_tokens = random.Random(index).randint(-(-mean // 2), mean + mean // 2)
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        uses = ((self._names[index % len(self._names)], 1.0),)
        times = [time.perf_counter()]
        async for piece in self._llm.generate(prompt, params, adapters=uses):
            times += [time.perf_counter()] * len(piece.outputs[0].token_ids)  # several when the client was slow
        assert len(times) == 1 + num_tokens, f"{len(times) - 1} tokens, asked for {num_tokens}"
        return [after - before for before, after in pairwise(times)]


def figure(adapters: int, slots: int, loads: Sequence[Answers]) -> Figure:
    """The median rate, and the distribution of all that the clients saw."""
    firsts = sorted(each for load in loads for each in load.firsts_s)
    gaps = sorted(each for load in loads for each in load.gaps_s)
    return Figure(
        adapters=adapters,
        slots=slots,
        output=statistics.median(load.output for load in loads),
        first_median_s=_quantile(firsts, 0.5),
        first_p90_s=_quantile(firsts, 0.9),
        gap_median_s=_quantile(gaps, 0.5),
        gap_p99_s=_quantile(gaps, 0.99),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values; 0 of none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """One row for each number of adapters."""
    options, machine = document["options"], document["machine"]
    title = (
        f"{document['model']} {document['dtype']}, {SHAPES[options['shape']].title}, {options['clients']} clients, "
        f"{options['prompt_tokens']} tokens in, {options['output_tokens']} out"
    )
    caption = f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}; {document['date']}"
    out = Table(title=title, caption=caption)
    out.add_column("adapters in slots")
    for heading in ("tokens/s", "first token\nmedian", "first token\np90", "next token\nmedian", "next token\np99"):
        out.add_column(heading, justify="right")
    for each in figures:
        times = (each.first_median_s, each.first_p90_s, each.gap_median_s, each.gap_p99_s)
        cells = [f"{seconds * 1000:.0f} ms" for seconds in times]
        out.add_row(f"{each.adapters} in {each.slots}", f"{each.output:.0f}", *cells)
    return out
