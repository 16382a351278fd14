"""`izh bench lora`: what adapters cost: rates with many of them in one batch, beside the base alone and PEFT.

Owns: which engines are measured together, and the table. How they are timed, and both rates: `timing.py`.
Must not know: how any engine works.

For each shape and number of adapters the command writes random adapters, and loads them into engines of equal age and
size, whose turns are interleaved:

    izh base        izh without adapters: what all ratios "of base" refer to
    izh n mixed     izh with n adapters, the requests of a batch spread over all of them (`contestants.deal`)
    izh n unused    that same engine, asked for the base model alone; with the largest number only
    PEFT n mixed    PEFT's `adapter_names` batch on transformers' `generate`, the same request with the same adapter

More adapters than requests take turns from repeat to repeat. Before the clock runs every adapter answers one prompt, so
that its weights lie in their slot; these answers must differ, or adapters would be measured that do nothing.
"""

import gc
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from izh.adapters.sites import num_adapter_values
from izh.bench import timing
from izh.bench.adapters import refuse_others, write_adapters
from izh.bench.contestants import DTYPES, Contestant, Izh, Peft
from izh.bench.document import caption, document, label, write
from izh.bench.options import LoraOptions, at_least_one
from izh.bench.shapes import SHAPES
from izh.bench.timing import Prompts, PromptSource, Rates, agreement, explicit, measure, num_calls
from izh.config import EngineOptions
from izh.engine.settings import GIB, kv_block_bytes, weight_bytes
from izh.errors import OptionError
from izh.llm import LLM
from izh.model.load import load_spec
from izh.model.source import ModelSource, resolve
from izh.model.spec import ModelSpec
from izh.request import SamplingParams

Use = Literal["base", "mixed", "unused", "peer"]

_PROBE_PROMPT, _PROBE_ANSWER = 16, 16  # tokens, at most, of the prompt that every adapter answers once


@dataclass(frozen=True, kw_only=True)
class Figure(Rates):
    """One engine with one number of adapters of one shape."""

    shape: str
    adapters: int
    use: Use
    agreement: float | None
    """Share of equal tokens: of "mixed" with the peer, of "unused" with the base; None if there is no other."""
    different: int | None
    """Of "mixed": how many of the adapters' and the base's answers to one prompt were there, at most adapters + 1."""


def report(engine: EngineOptions, options: LoraOptions) -> int:
    """Measure, print a table for each shape, write the JSON file if asked. Returns the exit status."""
    check(engine, options)
    engine = explicit(engine)
    source = resolve(engine.model, engine.revision)
    spec = load_spec(source)
    if engine.kv_cache_gb is None:
        engine = replace(engine, kv_cache_gb=enough_kv_gb(spec, engine, options))
    left_out = {count: why for count in options.adapters if (why := why_no_peer(options, count)) is not None}
    check_memory(spec, engine, options, left_out)
    shapes = tuple(dict.fromkeys(options.shape))
    found: list[Figure] = []
    for name in shapes:
        found += measure_shape(name, source, spec, engine, options, left_out)
    written = document(engine, source.name, options, found) | {"peer_left_out": left_out}
    console = Console()
    for name in shapes:
        console.print(table([figure for figure in found if figure.shape == name], written))
    write(written, options.json)
    return 0


def check(engine: EngineOptions, options: LoraOptions) -> None:
    """Raises OptionError for what cannot be measured."""
    timing.check(engine, options, [options.batch])
    at_least_one(options, "adapters", "max_peer_adapters")
    refuse_others(engine)


def why_no_peer(options: LoraOptions, count: int) -> str | None:
    """Why PEFT is not measured with so many adapters; None when it is."""
    if not options.peer:
        return "--no-peer"
    if find_spec("peft") is None:
        return "not installed: pip install peft"
    if count > options.max_peer_adapters:
        return f"above --max-peer-adapters {options.max_peer_adapters}"
    return None


def enough_kv_gb(spec: ModelSpec, engine: EngineOptions, options: LoraOptions) -> float:
    """GiB for two batches: of several engines in one process none may take its usual share of what is free."""
    length = max(options.prompt_tokens + options.output_tokens + 1, _PROBE_PROMPT + _PROBE_ANSWER)
    num_blocks = 2 * options.batch * -(-length // engine.block_size)
    assert engine.dtype is not None
    return num_blocks * kv_block_bytes(spec, engine.block_size, DTYPES[engine.dtype]) / GIB


def check_memory(spec: ModelSpec, engine: EngineOptions, options: LoraOptions, left_out: Collection[int]) -> None:
    """Raises OptionError when some group of engines would not fit the host's memory together."""
    assert engine.dtype is not None
    assert engine.kv_cache_gb is not None
    if engine.device != "cpu":
        return
    dtype, rank = DTYPES[engine.dtype], max(SHAPES[name].rank for name in options.shape)
    free = psutil.virtual_memory().available / GIB
    for count in options.adapters:
        copies = 2 if count in left_out else 3
        adapters = num_adapter_values(spec, count, rank) * (dtype.itemsize + 4 * (copies - 1))  # in slots; on the host
        needed = (copies * weight_bytes(spec, dtype) + adapters) / GIB + 2 * engine.kv_cache_gb
        if needed > free:
            raise OptionError(
                f"{count} adapters of rank {rank} and {copies} copies of the model need {needed:.1f} GiB of memory, "
                f"{free:.1f} are free; lower --adapters" + (", or use --no-peer" if copies == 3 else "")
            )


def measure_shape(
    name: str,
    source: ModelSource,
    spec: ModelSpec,
    engine: EngineOptions,
    options: LoraOptions,
    left_out: Collection[int],
) -> list[Figure]:
    """All groups of one shape, on adapters that are gone from the disk afterwards."""
    counts = tuple(dict.fromkeys(options.adapters))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Nothing is drawn while the clock runs: the bars are refreshed by hand, between calls.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)

    def advance(task: TaskID) -> None:
        bar.update(task, advance=1, refresh=True)

    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="izh-bench-lora-") as folder, bar:
        task = bar.add_task(f"{name}: writing adapters", total=max(counts))
        directories = []
        for directory in write_adapters(Path(folder), spec, SHAPES[name], max(counts)):
            directories.append(directory)
            advance(task)
        for count in counts:
            group = Group(
                source=source,
                engine=engine,
                options=options,
                shape=name,
                directories=tuple(directories[:count]),
                has_unused=count == max(counts),
                has_peer=count not in left_out,
            )
            task = bar.add_task(
                f"{name}: {count} adapters", total=num_calls(2 + group.has_unused + group.has_peer, options.repeats)
            )
            found += group.measure(partial(advance, task))
    return found


@dataclass(frozen=True, kw_only=True)
class Group:
    """The engines that are measured together: one number of adapters of one shape."""

    source: ModelSource
    engine: EngineOptions
    options: LoraOptions
    shape: str
    directories: tuple[Path, ...]
    has_unused: bool
    has_peer: bool

    def measure(self, after_call: Callable[[], None]) -> list[Figure]:
        """Load the engines, measure them, let them go."""
        gc.collect()  # the last group's engines, whose parts refer to each other, go only now
        count, options = len(self.directories), self.options
        names = [f"adapter-{index}" for index in range(count)]
        base = LLM(**asdict(self.engine), quiet=True)
        lora = tuple(f"{name}={directory}" for name, directory in zip(names, self.directories, strict=True))
        more = {"lora": lora, "max_loras": count, "max_lora_rank": SHAPES[self.shape].rank}
        adapted = LLM(**asdict(self.engine) | more, quiet=True)
        prompts = PromptSource(base.tokenizer.vocab_size, base.tokenizer.special_ids, options.prompt_tokens)
        different = num_different(adapted, names, prompts.take(1)[0][:_PROBE_PROMPT])
        contestants: dict[Use, Contestant] = {
            "base": Izh(base, "izh base"),
            "mixed": Izh(adapted, f"izh {count} mixed", names),
        }
        if self.has_unused:
            contestants["unused"] = Izh(adapted, f"izh {count} unused")
        if self.has_peer:
            contestants["peer"] = Peft(self.source, self.engine, self.directories, f"PEFT {count} mixed")
        measured = measure(
            tuple(contestants.values()), prompts, options.batch, options.output_tokens, options.repeats, after_call
        )
        return figures(dict(zip(contestants, measured, strict=True)), self.shape, count, different)


def num_different(llm: LLM, names: Sequence[str], prompt: list[int]) -> int:
    """How many answers to one prompt there are, of all adapters and of the base alone. Loads every adapter's weights
    into their slot, if there are as many slots."""
    params = SamplingParams(temperature=0, max_tokens=_PROBE_ANSWER, ignore_eos=True)
    lora = [None, *names]
    answers = llm.generate([prompt] * len(lora), params, lora=lora, progress=False)
    return len({tuple(answer.outputs[0].token_ids) for answer in answers})


def figures(measured: Mapping[Use, tuple[Rates, Prompts]], shape: str, adapters: int, different: int) -> list[Figure]:
    """Each engine's rates, its answers compared with those that must be the same."""
    same_as: dict[Use, Use] = {"mixed": "peer", "unused": "base"}
    found = []
    for use, (rates, answers) in measured.items():
        other = measured.get(same_as[use]) if use in same_as else None
        found.append(
            Figure(
                **asdict(rates),
                shape=shape,
                adapters=adapters,
                use=use,
                agreement=None if other is None else agreement(other[1], answers),
                different=different if use == "mixed" else None,
            )
        )
    return found


def table(figures: Sequence[Figure], document: dict[str, Any]) -> Table:
    """One shape's figures; ratios of each row to the base alone and to PEFT of its own group."""
    options, left_out = document["options"], document["peer_left_out"]
    title = (
        f"{document['model']} {document['dtype']}, {SHAPES[figures[0].shape].title}, tokens/s\n"
        f"batch {options['batch']}, {options['prompt_tokens']} tokens in, {options['output_tokens']} out"
    )
    # 80 columns wide at most: the width of a pipe.
    out = Table(title=title, caption="\n".join([*notes(figures, left_out), caption(figures, document)]), pad_edge=False)
    out.add_column("engine", no_wrap=True)
    for heading in ("prefill", "of\nbase", "of\nPEFT", "decode", "of\nbase", "of\nPEFT", "same\ntokens"):
        out.add_column(heading, justify="right")
    for count in dict.fromkeys(figure.adapters for figure in figures):
        group = {figure.use: figure for figure in figures if figure.adapters == count}
        base, peer = group["base"], group.get("peer")
        for use, figure in group.items():
            is_ours = use in ("mixed", "unused")
            cells = [label(figure)]
            for rate, of_base, of_peer in (
                (figure.prefill, base.prefill, peer and peer.prefill),
                (figure.decode, base.decode, peer and peer.decode),
            ):
                cells.append(f"{rate:.0f}")
                cells.append(f"{rate / of_base:.1%}" if is_ours else "")
                cells.append(f"{rate / of_peer:.2f}x" if use == "mixed" and of_peer else "")
            out.add_row(*cells, "" if figure.agreement is None else f"{figure.agreement:.1%}")
        if count in left_out:
            out.add_row(f"PEFT {count} mixed", *["-"] * 7)
        out.add_section()
    return out


def notes(figures: Sequence[Figure], left_out: Mapping[int, str]) -> list[str]:
    """What the table leaves out, and whether the adapters were different ones."""
    lines = []
    for why in dict.fromkeys(left_out.values()):
        counts = ", ".join(str(count) for count in left_out if left_out[count] == why)
        lines.append(f"PEFT left out with {counts} adapters ({why})")
    mixed = [figure for figure in figures if figure.different is not None]
    alike = [figure for figure in mixed if figure.different != figure.adapters + 1]
    lines += [
        f"{figure.adapters} adapters and the base gave only {figure.different} different answers to one prompt"
        for figure in alike
    ]
    if not alike:
        lines.append("to one prompt all adapters and the base gave different answers")
    return lines
