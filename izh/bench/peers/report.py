"""`izh bench peers`: izh and every installed peer on the same work, in turns, into one report.

Owns: from options to files: which sections run, with which engines, and what is kept of earlier runs.
Must not know: how engines are asked (`measuring.py`), what a report looks like (`markdown.py`, `plots.py`).

A section is measured whole, all its engines side by side, and replaces that section in the report; sections that are
not asked for stay as they were, with the machine and date they were measured on.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer as Tokenizers

from izh.bench import timing
from izh.bench.adapters import refuse_others, write_adapters
from izh.bench.document import document, write
from izh.bench.options import at_least_one
from izh.bench.peers import markdown, plots
from izh.bench.peers.catalogue import Environments, how_to_set_up
from izh.bench.peers.forms import form_of
from izh.bench.peers.measuring import LeftOut, Texts, Turns
from izh.bench.peers.options import PeersOptions
from izh.bench.peers.remote import Load, Remote
from izh.bench.peers.sections import CONTEXT_BATCH, IZH, SECTIONS, Entry, Group, Section, groups_of
from izh.bench.shapes import SHAPES
from izh.bench.timing import PromptSource, num_calls
from izh.config import EngineOptions
from izh.engine.settings import GIB, kv_block_bytes
from izh.errors import OptionError
from izh.model.demo_embedder import demo_embedder_directory
from izh.model.load import load_spec
from izh.model.source import resolve
from izh.text.tokenizer import Tokenizer

SHAPE = SHAPES["r16-all"]
_DRIVERS = Path(__file__).parent / "drivers"
_LENGTH_STEP = 64  # engines reserve whole blocks of a sequence; this is a multiple of all their sizes here


def report(engine: EngineOptions, options: PeersOptions) -> int:
    """Set peers up, if asked to; else measure, and write the report. Returns the exit status."""
    environments = Environments(options.environments)
    if options.set_up:
        for name in dict.fromkeys(options.set_up):
            environments.set_up(name)
        return 0
    plots.check()
    run = Run(engine, options, environments)
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "peers.json"
    written: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for name in SECTIONS:
        if name in options.only:
            written[name] = run.section(name)
            file.write_text(json.dumps(written, indent=2) + "\n")  # after each: a later one may be interrupted
    text = markdown.report(written)
    (folder / "peers.md").write_text(text)
    plots.write(written, folder)
    write(written, options.json)
    print(text)
    return 0


class Run:
    """One call of the command: the model, its adapters, and who is installed."""

    def __init__(self, engine: EngineOptions, options: PeersOptions, environments: Environments) -> None:
        """Raises OptionError for what cannot be measured."""
        check(engine, options)
        self._engine = replace(timing.explicit(engine), device="cpu", dtype="fp32")
        self._options = options
        self._environments = environments
        self._source = resolve(engine.model, engine.revision)
        self._spec = load_spec(self._source)
        longest = max(options.context) + options.output_tokens + 1
        if longest > self._spec.max_length:
            raise OptionError(
                f"--context {max(options.context)} and its answer are {longest} tokens, and {self._source.name} takes "
                f"{self._spec.max_length}; ask for less"
            )
        self._num_threads = engine.num_threads or len(os.sched_getaffinity(0))
        self._versions = {name: environments.version(name) for name in options.peers}

    def section(self, name: str) -> dict[str, Any]:
        """Measure one, as JSON."""
        section, options = SECTIONS[name], self._options
        asked = [entry for entry in section.entries if entry.peer is None or entry.peer in options.peers]
        here = [entry for entry in asked if entry.peer is None or self._versions[entry.peer] is not None]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Nothing is drawn while the clock runs: the bar is refreshed by hand, between calls.
        bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        with bar, tempfile.TemporaryDirectory(prefix="izh-bench-peers-") as folder:
            task = bar.add_task(name, total=None)
            bar.refresh()
            turns = Turns(section.reference, options.repeats, lambda: bar.update(task, advance=1, refresh=True))
            turns.left_out += [
                LeftOut(engine=entry.label, why=f"missing: {how_to_set_up(entry.peer)}")
                for entry in asked
                if entry.peer is not None and entry not in here
            ]
            turns.left_out += [LeftOut(engine=engine, why=why) for engine, why in section.absent.items()]
            if name == "embeddings":
                bar.update(task, total=len(here) * (1 + options.repeats))
                self._embeddings(turns, here)
            else:
                groups = groups_of(name, options)
                calls = num_calls(len(here), options.repeats)
                bar.update(task, total=sum(len(group.cells) for group in groups) * calls)
                most = max(group.adapters for group in groups)
                adapters = [str(path) for path in write_adapters(Path(folder), self._spec, SHAPE, most)]
                for group in groups:
                    self._text(turns, group, here, adapters[: group.adapters])
        return self._document(section, turns, here)

    def _text(self, turns: Turns, group: Group, entries: Sequence[Entry], adapters: Sequence[str]) -> None:
        tokenizer = Tokenizer.load(self._source.path)
        max_batch = max(batch for batch, _length in group.cells)
        longest = max(length for _batch, length in group.cells) + self._options.output_tokens + 1
        max_len = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, self._spec.max_length)
        load = Load(
            model="",
            dtype="",
            num_threads=self._num_threads,
            max_batch=max_batch,
            max_len=max_len,
            # For two batches: none of several engines at once may take its usual share of what is free.
            kv_gib=2 * max_batch * kv_block_bytes(self._spec, max_len, torch.float32) / GIB,
            adapters=adapters,
            rank=SHAPE.rank,
        )
        sources: dict[int, PromptSource] = {}

        def prompts(length: int) -> PromptSource:
            if length not in sources:
                sources[length] = PromptSource(tokenizer.vocab_size, tokenizer.special_ids, length, seed=length)
            return sources[length]

        turns.text(group, entries, lambda entry: self._start(entry, load), prompts, self._options.output_tokens)

    def _embeddings(self, turns: Turns, entries: Sequence[Entry]) -> None:
        folder = self._options.embedder
        directory = demo_embedder_directory() if folder == "demo" else Path(folder).expanduser()
        tokenizer = Tokenizers.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        load = Load(model=str(directory), dtype="", num_threads=self._num_threads)
        turns.embeddings(entries, lambda entry: self._start(entry, load, directory), Texts(tokenizer))

    def _start(self, entry: Entry, load: Load, model: Path | None = None) -> Remote:
        """A loaded contestant. `model` None: the section's model in the entry's form. Raises PeerError, OptionError."""
        if model is None:
            model = form_of(self._source, entry.form, self._environments.python("openvino"))
        options = dict(entry.options)
        if entry.driver == IZH.driver:
            options = asdict(replace(self._engine, kv_cache_gb=self._engine.kv_cache_gb or load.kv_gib)) | options
        is_ours = entry.peer is None
        python = Path(sys.executable) if entry.peer is None else self._environments.python(entry.peer)
        path = Path(__file__).parents[3] if is_ours else None
        remote = Remote(entry.label, python, _DRIVERS / f"{entry.driver}.py", self._options.limit_s, path)
        remote.load(replace(load, model=str(model), dtype=entry.dtype, options=options))
        return remote

    def _document(self, section: Section, turns: Turns, entries: Sequence[Entry]) -> dict[str, Any]:
        """All that a reader needs to judge the section."""
        peers = {entry.peer: self._versions[entry.peer] for entry in entries if entry.peer is not None}
        options = replace(self._options, environments=None, json=None)  # where files lie here is no part of the result
        return document(self._engine, self._source.name, options, turns.figures) | {
            "title": section.title,
            "reference": section.reference,
            "threads": self._num_threads,
            "versions": peers,
            "left_out": [asdict(each) for each in turns.left_out],
        }


def check(engine: EngineOptions, options: PeersOptions) -> None:
    """Raises OptionError for what cannot be measured."""
    timing.check(engine, options, [*options.batch, CONTEXT_BATCH])
    at_least_one(options, "adapters", "context", "limit_s")
    if engine.device not in (None, "cpu") or engine.dtype not in (None, "fp32"):
        raise OptionError(
            "this command compares engines on the CPU, and chooses each one's dtype: leave out --device, --dtype"
        )
    if engine.quantization is not None:
        raise OptionError("--quantization is not for this command, which measures both: see --only")
    refuse_others(engine)
