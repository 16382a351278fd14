"""The composition: the only file that knows which features exist.

Owns: how an EngineCore is put together from options.
Must not know: how anything in it works.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.config import EngineOptions
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
from izh.seams import Gate, Head


@dataclass(frozen=True)
class Engine:
    """A built engine and what it resolved to."""

    core: EngineCore
    settings: Settings


def build(options: EngineOptions, source: ModelSource, quiet: bool = False) -> Engine:
    """Load the model and put the engine together. Raises ModelLoadError or OptionError."""
    spec = load_spec(source)
    settings = resolve(options, spec)
    ops = select(settings.device, settings.kernels)
    with _compiling(quiet) as progress:
        prepare(ops, settings.num_threads, progress)
    model, fingerprint = load_decoder(source, spec, ops, settings.device, settings.dtype, quiet=quiet)
    return Engine(compose(settings, model, fingerprint), settings)


def compose(settings: Settings, model: Decoder, fingerprint: bytes) -> EngineCore:
    """An engine around a loaded model, with KV pages of its own. `fingerprint` is the weights' identity."""
    spec, limits, device = model.spec, settings.limits, settings.device
    gates: list[Gate] = [SamplingGate(spec.vocab_size)]
    heads: list[Head] = [
        SamplingHead(model.logits, spec.vocab_size, frozenset(spec.eos_token_ids), settings.max_model_len)
    ]
    keys = BlockKeys(limits.block_size, fingerprint, spec.length_key, [gate.key for gate in gates])
    scheduler = Scheduler(limits, BlockPool(settings.num_blocks), keys, tuple(gates))
    pages = allocate_pages(model, settings.num_blocks, limits.block_size, settings.dtype, device)
    runner = Runner(model, pages, limits.block_size, device, stages=[], heads=heads)
    return EngineCore(scheduler, runner, gates, heads, settings.max_model_len, spec.vocab_size)


@contextlib.contextmanager
def _compiling(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for the first start's compiling; what comes from the cache on disk is over before it shows."""
    bar = Progress(console=Console(stderr=True), disable=quiet, transient=True)
    with bar:
        task = bar.add_task("Compiling CPU kernels", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
