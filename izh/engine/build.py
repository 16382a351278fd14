"""The composition: the only file that knows which features exist.

Owns: how an EngineCore is put together from options.
Must not know: how anything in it works.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from izh.adapters.bank import AdapterBank
from izh.adapters.gate import AdapterGate
from izh.adapters.peft import read_peft
from izh.adapters.shelf import AdapterShelf
from izh.adapters.sites import num_adapter_values
from izh.adapters.slots import SlotTable
from izh.adapters.stage import AdapterStage
from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.config import EngineOptions, lora_directories
from izh.engine.core import EngineCore
from izh.engine.settings import Settings, resolve
from izh.kernels.select import prepare, select
from izh.model.decoder import Decoder
from izh.model.load import load_decoder, load_spec
from izh.model.source import ModelSource
from izh.runner.runner import Runner, allocate_pages
from izh.sampling.gate import SamplingGate
from izh.sampling.head import SamplingHead
from izh.schedule.scheduler import Scheduler
from izh.seams import Gate, Head, Stage


@dataclass(frozen=True)
class Engine:
    """A built engine and what it resolved to."""

    core: EngineCore
    settings: Settings


def build(options: EngineOptions, source: ModelSource, quiet: bool = False) -> Engine:
    """Load the model and put the engine together. Raises ModelLoadError or OptionError."""
    spec = load_spec(source)
    num_values = num_adapter_values(spec, options.max_loras, options.max_lora_rank) if options.lora else 0
    settings = resolve(options, spec, num_values)
    ops = select(settings.device, settings.kernels)
    with _compiling(quiet) as progress:
        prepare(ops, settings.num_threads, progress)
    model, fingerprint = load_decoder(source, spec, ops, settings.device, settings.dtype, quiet=quiet)
    adapters = Adapters.load(options, model, settings) if options.lora else None
    return Engine(compose(settings, model, fingerprint, adapters), settings)


@dataclass(frozen=True)
class Adapters:
    """The model's adapter bank and the adapters known by name."""

    bank: AdapterBank
    shelf: AdapterShelf

    @classmethod
    def load(cls, options: EngineOptions, model: Decoder, settings: Settings) -> "Adapters":
        """Wrap the model and read the adapters that the options name. Raises AdapterError."""
        backend = "torch" if settings.kernels == "reference" else "cpu"
        bank = AdapterBank(model, options.max_loras, options.max_lora_rank, backend=backend)
        shelf = AdapterShelf(bank.check)
        for name, directory in lora_directories(options).items():
            shelf.put(name, read_peft(directory, bank.shapes))
        return cls(bank, shelf)


def compose(settings: Settings, model: Decoder, fingerprint: bytes, adapters: Adapters | None = None) -> EngineCore:
    """An engine around a loaded model, with KV pages of its own. `fingerprint` is the weights' identity."""
    spec, limits, device = model.spec, settings.limits, settings.device
    gates: list[Gate] = [SamplingGate(spec.vocab_size)]
    heads: list[Head] = [
        SamplingHead(model.logits, spec.vocab_size, frozenset(spec.eos_token_ids), settings.max_model_len)
    ]
    stages: list[Stage] = []
    if adapters is None:
        gates.append(AdapterGate(SlotTable(1), AdapterShelf(lambda adapter: None).find))  # refuses every name
    else:
        adapter_gate = AdapterGate(adapters.bank.slots, adapters.shelf.find)
        gates.append(adapter_gate)
        stages.append(AdapterStage(adapters.bank, adapter_gate))
    keys = BlockKeys(limits.block_size, fingerprint, spec.length_key, [gate.key for gate in gates])
    scheduler = Scheduler(limits, BlockPool(settings.num_blocks), keys, tuple(gates))
    pages = allocate_pages(model, settings.num_blocks, limits.block_size, settings.dtype, device)
    runner = Runner(model, pages, limits.block_size, device, stages=stages, heads=heads)
    return EngineCore(scheduler, runner, gates, heads, settings.max_model_len, spec.vocab_size)


@contextlib.contextmanager
def _compiling(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for the first start's compiling; what comes from the cache on disk is over before it shows."""
    bar = Progress(console=Console(stderr=True), disable=quiet, transient=True)
    with bar:
        task = bar.add_task("Compiling CPU kernels", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
