"""`izh bench throughput`: prefill and decode rates of the in-process engine, beside transformers in the same run.

Owns: what is timed, in which order, and how times become rates.
Must not know: how either engine works.

Each repeat asks every engine in turn for the same prompts, first for 1 token each, then (other prompts) for n + 1:

    prefill rate = batch * prompt_tokens / T(1)               the first token of every prompt, its sampling included
    decode rate  = batch * n / (T(n + 1) - T(1))              the n tokens after it: what they add to the time

T is the median over the repeats. Prompts are random tokens, never used twice by an engine, so nothing is read from a
prefix cache. The first call of each shape is not timed.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from izh.bench.contestants import Contestant, Izh, Transformers
from izh.bench.machine import describe
from izh.bench.options import ThroughputOptions
from izh.config import EngineOptions
from izh.errors import OptionError
from izh.llm import LLM
from izh.model.source import resolve
from izh.version import __version__

Prompts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One engine at one batch size. Rates in tokens/s, times in seconds, `agreement` with the first engine."""

    engine: str
    batch: int
    prefill: float
    decode: float
    first_s: float
    whole_s: float
    agreement: float
    """Share of this engine's tokens that equal the first engine's: both are greedy on the same weights."""


def report(engine: EngineOptions, options: ThroughputOptions) -> int:
    """Measure, print a table, write the JSON file if asked. Returns the exit status."""
    check(engine, options)
    engine = explicit(engine)
    source = resolve(engine.model, engine.revision)
    llm = LLM(**asdict(engine), quiet=True)
    contestants: list[Contestant] = [Izh(llm)]
    if options.peer:
        contestants.append(Transformers(source, engine))
    prompts = PromptSource(llm.tokenizer.vocab_size, llm.tokenizer.special_ids, options.prompt_tokens)
    console = Console(stderr=True)
    figures: list[Figure] = []
    for batch in options.batch:
        with console.status(f"measuring batch {batch}"):
            figures += measure(contestants, prompts, batch, options.output_tokens, options.repeats)
    assert engine.device is not None
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "izh": __version__,
        "machine": describe(engine.device),
        "model": source.name,
        "device": engine.device,
        "dtype": engine.dtype,
        "options": {key: value for key, value in asdict(options).items() if key != "json"},
        "figures": [asdict(figure) for figure in figures],
    }
    Console().print(table(figures, document))
    if options.json is not None:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0


def check(engine: EngineOptions, options: ThroughputOptions) -> None:
    """Raises OptionError for what cannot be measured."""
    for flag, value in (
        ("--prompt-tokens", options.prompt_tokens),
        ("--output-tokens", options.output_tokens),
        ("--repeats", options.repeats),
        *(("--batch", batch) for batch in options.batch),
    ):
        if value < 1:
            raise OptionError(f"{flag} must be at least 1, got {value}")
    if max(options.batch) > engine.max_num_seqs:
        raise OptionError(
            f"--batch {max(options.batch)} exceeds --max-num-seqs {engine.max_num_seqs}: it would not run at once; "
            "raise --max-num-seqs"
        )


def explicit(engine: EngineOptions) -> EngineOptions:
    """The options with device and dtype spelled out, so that both engines get the same ones."""
    device = engine.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return replace(engine, device=device, dtype=engine.dtype or ("fp32" if device == "cpu" else "bf16"))


class PromptSource:
    """Random prompts of one length, of ordinary tokens. The same ones in the same order at every run."""

    def __init__(self, vocab_size: int, special_ids: frozenset[int], length: int) -> None:
        self._ids = [token for token in range(vocab_size) if token not in special_ids]
        self._length = length
        self._random = random.Random(0)

    def take(self, count: int) -> Prompts:
        """Prompts never given out before."""
        return [self._random.choices(self._ids, k=self._length) for _ in range(count)]


def measure(
    contestants: Sequence[Contestant], prompts: PromptSource, batch: int, num_tokens: int, repeats: int
) -> list[Figure]:
    """One figure per contestant. Their turns are interleaved, so that a disturbance of the machine hits all alike."""
    for contestant in contestants:
        contestant.answer(prompts.take(batch), 2)
    first_s: dict[str, list[float]] = {each.name: [] for each in contestants}
    whole_s: dict[str, list[float]] = {each.name: [] for each in contestants}
    answers: dict[str, Prompts] = {each.name: [] for each in contestants}
    for repeat in range(repeats):
        short, long = prompts.take(batch), prompts.take(batch)
        order = contestants if repeat % 2 == 0 else contestants[::-1]
        for each in order:
            seconds, _ = timed(each, short, 1)
            first_s[each.name].append(seconds)
        for each in order:
            seconds, tokens = timed(each, long, num_tokens + 1)
            whole_s[each.name].append(seconds)
            answers[each.name] += tokens
    reference = answers[contestants[0].name]
    prompt_tokens = len(short[0])
    return [
        figure(
            each.name,
            batch,
            prompt_tokens,
            num_tokens,
            statistics.median(first_s[each.name]),
            statistics.median(whole_s[each.name]),
            agreement(reference, answers[each.name]),
        )
        for each in contestants
    ]


def timed(contestant: Contestant, prompts: Prompts, num_tokens: int) -> tuple[float, Prompts]:
    """Seconds, and the answers, each checked to be as long as it was asked to be."""
    start = time.perf_counter()
    answers = contestant.answer(prompts, num_tokens)
    seconds = time.perf_counter() - start
    lengths = {len(answer) for answer in answers}
    assert lengths == {num_tokens}, f"{contestant.name}: answers of {lengths} tokens, asked for {num_tokens}"
    return seconds, answers


def figure(
    engine: str, batch: int, prompt_tokens: int, num_tokens: int, first_s: float, whole_s: float, agreement: float
) -> Figure:
    """Times to rates. Raises OptionError when the answers are too short for the clock to see the decode steps."""
    if whole_s <= first_s:
        raise OptionError(
            f"{engine}, batch {batch}: {num_tokens} more tokens took no measurable time ({whole_s:.3f} s against "
            f"{first_s:.3f} s); raise --output-tokens or --repeats, or quiet the machine"
        )
    return Figure(
        engine=engine,
        batch=batch,
        prefill=batch * prompt_tokens / first_s,
        decode=batch * num_tokens / (whole_s - first_s),
        first_s=first_s,
        whole_s=whole_s,
        agreement=agreement,
    )


def agreement(reference: Prompts, answers: Prompts) -> float:
    """Share of equal tokens at equal places, 0..1."""
    pairs = [pair for a, b in zip(reference, answers, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """The figures under each other; a ratio says how many times the peer's rate izh reaches."""
    machine, options = document["machine"], document["options"]
    title = f"{document['model']} {document['dtype']}, prompts of {options['prompt_tokens']} tokens, tokens/s"
    caption = (
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}; "
        f"median of {options['repeats']}; {document['date']}"
    )
    out = Table(title=title, caption=caption)
    out.add_column("batch", justify="right")
    out.add_column("engine")
    for heading in ("prefill", "ratio", "decode", "ratio", "same tokens"):
        out.add_column(heading, justify="right")
    for batch in dict.fromkeys(figure.batch for figure in figures):
        ours, *peers = [figure for figure in figures if figure.batch == batch]
        out.add_row(str(batch), ours.engine, f"{ours.prefill:.0f}", "", f"{ours.decode:.0f}", "", "")
        for peer in peers:
            prefill, decode = ours.prefill / peer.prefill, ours.decode / peer.decode
            rates = (f"{peer.prefill:.0f}", f"{prefill:.2f}", f"{peer.decode:.0f}", f"{decode:.2f}")
            out.add_row("", peer.engine, *rates, f"{peer.agreement:.1%}")
        out.add_section()
    return out
