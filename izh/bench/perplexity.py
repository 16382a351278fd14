"""`izh bench perplexity`: what holding the weights in 8 or 4 bits does to the model's predictions.

Owns: the text, how it is cut, the figure made of its log-probabilities, and the table.
Must not know: how an engine computes them.

The text (`perplexity.txt`, in the public domain: the Declaration of Independence, the first two scenes of Hamlet) is
cut into windows, each scored by itself from its second token on:

    perplexity = exp(- mean over the scored tokens of log p(token | the window before it))

An engine other than izh is compared by scoring the same `windows` and making `figure`s of what it says.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from izh.bench.document import document, write
from izh.bench.options import PerplexityOptions
from izh.bench.timing import explicit
from izh.config import QUANTIZATIONS, EngineOptions
from izh.errors import OptionError
from izh.llm import LLM
from izh.model.source import resolve
from izh.request import SamplingParams

TEXT = Path(__file__).with_name("perplexity.txt")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One engine on the text. `increase` is its perplexity over the first engine's, less 1."""

    engine: str
    perplexity: float
    increase: float
    num_tokens: int


def report(engine: EngineOptions, options: PerplexityOptions) -> int:
    """Score the text with each way to hold the weights, print a table, write the JSON file if asked. Returns the exit
    status."""
    if options.window_tokens < 2:
        raise OptionError(f"--window-tokens must be at least 2, got {options.window_tokens}")
    engine = explicit(engine)
    source = resolve(engine.model, engine.revision)
    found: list[Figure] = []
    for quantization in (None, *QUANTIZATIONS):
        name = "izh " + (quantization or str(engine.dtype))
        llm = LLM(**asdict(replace(engine, quantization=quantization)), quiet=True)
        pieces = windows(llm.tokenizer.encode(TEXT.read_text(encoding="utf-8")), options.window_tokens)
        found.append(figure(name, score(llm, pieces, name), found))
    written = document(engine, source.name, options, found)
    Console().print(table(found, written))
    write(written, options.json)
    return 0


def windows(token_ids: list[int], size: int) -> list[list[int]]:
    """Pieces of `size` tokens, the last one shorter; none of a single token, which nothing predicts."""
    pieces = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


def score(llm: LLM, pieces: Sequence[list[int]], name: str) -> list[float]:
    """The log-probability of every token but the first of each piece."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        for piece in bar.track(pieces, description=name):
            (answer,) = llm.generate([piece], params, progress=False)
            assert answer.prompt_logprobs is not None
            found += [each.logprob for each in answer.prompt_logprobs if each is not None]
    return found


def figure(engine: str, logprobs: Sequence[float], before: Sequence[Figure] = ()) -> Figure:
    """An engine's figure, compared with the first of those `before` it."""
    perplexity = math.exp(-sum(logprobs) / len(logprobs))
    reference = before[0].perplexity if before else perplexity
    return Figure(engine=engine, perplexity=perplexity, increase=perplexity / reference - 1, num_tokens=len(logprobs))


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """One row for each engine."""
    window = document["options"]["window_tokens"]
    out = Table(
        title=f"{document['model']}, perplexity in windows of {window} tokens",
        caption=f"{figures[0].num_tokens} tokens scored; {document['date']}",
    )
    out.add_column("engine")
    out.add_column("perplexity", justify="right")
    out.add_column(f"against {figures[0].engine}", justify="right")
    for each in figures:
        out.add_row(each.engine, f"{each.perplexity:.3f}", f"{each.increase:+.2%}" if each is not figures[0] else "")
    return out
