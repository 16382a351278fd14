"""`izh bench throughput`: prefill and decode rates of the in-process engine, beside transformers in the same run, and
beside itself with whole weights where they are quantized.

Owns: which engines are measured at which batch sizes, and the table. How they are timed: `timing.py`.
Must not know: how either engine works.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from izh.bench.contestants import Contestant, Izh, Transformers
from izh.bench.document import caption, document, label, write
from izh.bench.options import ThroughputOptions
from izh.bench.timing import Prompts, PromptSource, Rates, agreement, check, explicit, measure
from izh.config import EngineOptions
from izh.llm import LLM
from izh.model.source import resolve


@dataclass(frozen=True, kw_only=True)
class Figure(Rates):
    """One engine at one batch size, and its agreement with the first engine."""

    agreement: float
    """Share of this engine's tokens that equal the first engine's: both are greedy on the same weights."""


def report(engine: EngineOptions, options: ThroughputOptions) -> int:
    """Measure, print a table, write the JSON file if asked. Returns the exit status."""
    check(engine, options, options.batch)
    engine = explicit(engine)
    source = resolve(engine.model, engine.revision)
    llm = LLM(**asdict(engine), quiet=True)
    contestants: list[Contestant] = [Izh(llm)]
    if engine.quantization is not None:
        unquantized = LLM(**asdict(replace(engine, quantization=None)), quiet=True)
        contestants = [Izh(llm, f"izh {engine.quantization}"), Izh(unquantized, f"izh {engine.dtype}")]
    if options.peer:
        contestants.append(Transformers(source, engine))
    prompts = PromptSource(llm.tokenizer.vocab_size, llm.tokenizer.special_ids, options.prompt_tokens)
    console = Console(stderr=True)
    found: list[Figure] = []
    for batch in options.batch:
        with console.status(f"measuring batch {batch}"):
            found += figures(measure(contestants, prompts, batch, options.output_tokens, options.repeats))
    written = document(engine, source.name, options, found)
    Console().print(table(found, written))
    write(written, options.json)
    return 0


def figures(measured: Sequence[tuple[Rates, Prompts]]) -> list[Figure]:
    """Each engine's rates, its answers compared with the first one's."""
    reference = measured[0][1]
    return [Figure(**asdict(rates), agreement=agreement(reference, answers)) for rates, answers in measured]


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """The figures under each other; a ratio says how many times the peer's rate izh reaches."""
    title = (
        f"{document['model']} {document['dtype']}, prompts of {document['options']['prompt_tokens']} tokens, tokens/s"
    )
    out = Table(title=title, caption=caption(figures, document))
    out.add_column("batch", justify="right")
    out.add_column("engine")
    for heading in ("prefill", "ratio", "decode", "ratio", "same tokens"):
        out.add_column(heading, justify="right")
    for batch in dict.fromkeys(figure.batch for figure in figures):
        ours, *peers = [figure for figure in figures if figure.batch == batch]
        out.add_row(str(batch), label(ours), f"{ours.prefill:.0f}", "", f"{ours.decode:.0f}", "", "")
        for peer in peers:
            prefill, decode = ours.prefill / peer.prefill, ours.decode / peer.decode
            rates = (f"{peer.prefill:.0f}", f"{prefill:.2f}", f"{peer.decode:.0f}", f"{decode:.2f}")
            out.add_row("", label(peer), *rates, f"{peer.agreement:.1%}")
        out.add_section()
    return out
