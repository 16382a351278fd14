"""The composition: the only file that knows which features exist.

Owns: how an EngineCore is put together from options.
Must not know: how anything in it works.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

from izh.adapters.bank import AdapterBank, backend_of
from izh.adapters.gate import AdapterGate
from izh.adapters.peft import read_peft
from izh.adapters.shelf import AdapterShelf, find_no_adapter
from izh.adapters.sites import num_adapter_values
from izh.adapters.slots import SlotTable
from izh.adapters.stage import AdapterStage
from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.config import EngineOptions, lora_directories
from izh.engine.core import EngineCore
from izh.engine.encoders import Encoders
from izh.engine.messages import EncoderTask
from izh.engine.settings import Settings, resolve
from izh.kernels.memory import keep_freed_memory
from izh.kernels.select import prepare, select, tuned
from izh.model.decoder import Decoder
from izh.model.load import load_decoder, load_spec
from izh.model.source import ModelSource
from izh.multimodal.gate import ImageGate
from izh.multimodal.stage import ImageStage
from izh.multimodal.travel import Arrivals, pack
from izh.pooling.gate import PoolingGate
from izh.pooling.head import LogitsHead, PoolingHead
from izh.pooling.load import load_embedder, load_reranker
from izh.pooling.service import PoolingService
from izh.request import Entry, PackedFeatures
from izh.runner.runner import Runner, allocate_pages
from izh.sampling.gate import SamplingGate
from izh.sampling.head import SamplingHead
from izh.schedule.scheduler import Scheduler
from izh.seams import Gate, Head, Stage


@dataclass(frozen=True)
class Engine:
    """A built engine and what it resolved to. `adapters` is None when it was built for none; `generates` is False for
    a checkpoint without an LM head."""

    core: EngineCore
    settings: Settings
    generates: bool
    adapters: AdapterShelf | None


def load_encoders(directories: Mapping[EncoderTask, str], quantization: str | None = None) -> Encoders:
    """The models beside the generator, with its quantization as far as they can. Raises ModelLoadError, OptionError."""
    services = {
        task: (load_embedder if task == "embed" else load_reranker)(directory, quantization=quantization)
        for task, directory in directories.items()
    }
    return Encoders({task: partial(_computed, service) for task, service in services.items()})


def _computed(service: PoolingService, entries: list[Entry]) -> list[bytes]:
    return [row.numpy().astype("<f4", copy=False).tobytes() for row in service.compute(entries)]


def build(options: EngineOptions, source: ModelSource, quiet: bool = False) -> Engine:
    """Load the model and put the engine together. Raises ModelLoadError, AdapterError or OptionError."""
    directories = dict(source.adapters) | lora_directories(options)
    spec = load_spec(source)
    has_adapters = bool(directories) or options.allow_runtime_lora
    num_values = num_adapter_values(spec, options.max_loras, options.max_lora_rank) if has_adapters else 0
    settings = resolve(options, spec, num_values)
    ops = select(settings.device, settings.kernels)
    with _progress(quiet, "Compiling CPU kernels") as progress:
        prepare(ops, settings.num_threads, progress, quantized=settings.quantization is not None)
    if settings.quantization is None:
        ops = tuned(ops, spec.hidden_size, settings.kernel_rows)
    model, fingerprint = load_decoder(
        source, spec, ops, settings.device, settings.dtype, quiet=quiet, quantization=settings.quantization
    )
    if settings.packs_weights:
        model.pack()
    model.join()
    adapters = Adapters.around(model, options, settings) if has_adapters else None
    if adapters is not None:
        with _progress(quiet, "Reading adapters") as progress:
            for done, (name, directory) in enumerate(directories.items(), 1):
                adapters.shelf.put(name, adapters.shelf.read(directory).result(), directory)
                progress(done, len(directories))
    core = compose(settings, model, fingerprint, adapters)
    keep_freed_memory()
    return Engine(core, settings, spec.has_lm_head, None if adapters is None else adapters.shelf)


@dataclass(frozen=True)
class Adapters:
    """A model's adapter bank, the adapters known by name, and the gate that leases them."""

    bank: AdapterBank
    shelf: AdapterShelf
    gate: AdapterGate

    @classmethod
    def around(cls, model: Decoder, options: EngineOptions, settings: Settings) -> "Adapters":
        """Wrap the model; no adapter is known yet."""
        bank = AdapterBank(model, options.max_loras, options.max_lora_rank, backend=backend_of(settings.kernels))
        shelf = AdapterShelf(
            lambda directory: read_peft(directory, bank.shapes),
            bank.fit,
            max_bytes=settings.lora_host_bytes,
            num_leases=lambda digest, name: gate.num_leases(digest, name),
        )
        gate = AdapterGate(bank.slots, shelf.find)
        return cls(bank, shelf, gate)


def compose(settings: Settings, model: Decoder, fingerprint: bytes, adapters: Adapters | None = None) -> EngineCore:
    """An engine around a loaded model, with KV pages of its own. `fingerprint` is the weights' identity."""
    spec, limits, device = model.spec, settings.limits, settings.device
    arrivals = Arrivals(spec.image_row_width, spec.ropes[0].rotary_dim, settings.dtype)
    # A step has room for a token of each running sequence besides an image that has to be whole.
    max_whole = limits.max_num_batched_tokens - limits.max_num_seqs if spec.images_both_ways else None
    images = ImageGate(arrivals.features_of, spec.ropes, model.rotary[0].mrope, max_whole)
    gates: list[Gate] = [
        SamplingGate(spec.vocab_size, spec.has_lm_head),
        PoolingGate(spec.vocab_size, spec.has_lm_head),
        images,
    ]
    heads: list[Head] = [
        SamplingHead(model.logits, model.ops, spec.vocab_size, frozenset(spec.eos_token_ids), settings.max_model_len),
        PoolingHead(),
        LogitsHead(model.logits),
    ]
    stages: list[Stage] = [ImageStage(images, model.rotary)]
    if adapters is None:
        gates.append(AdapterGate(SlotTable(1), find_no_adapter))
    else:
        gates.append(adapters.gate)
        stages.append(AdapterStage(adapters.bank, adapters.gate))
    keys = BlockKeys(limits.block_size, fingerprint, spec.length_key, [gate.key for gate in gates])
    scheduler = Scheduler(limits, BlockPool(settings.num_blocks), keys, tuple(gates))
    pages = allocate_pages(model, settings.num_blocks, limits.block_size, settings.dtype, device)
    runner = Runner(model, pages, limits.block_size, device, stages=stages, heads=heads)
    return EngineCore(scheduler, runner, gates, heads, settings.max_model_len, spec.vocab_size)


def pack_features(features: Mapping[str, Any]) -> PackedFeatures:
    """What goes along with a prompt (`VisionPrompt.features`), as it travels to an engine. Raises RequestError."""
    return pack(features)


@contextlib.contextmanager
def _progress(quiet: bool, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for what takes long at the first start only: whatever is quick is over before it shows."""
    bar = Progress(console=Console(stderr=True), disable=quiet, transient=True)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
