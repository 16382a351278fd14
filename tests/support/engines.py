"""Engines for whole-engine tests: one loaded model, many schedulers around it."""

from dataclasses import dataclass, replace

from izh.config import EngineOptions
from izh.engine.build import compose
from izh.engine.core import EngineCore
from izh.engine.settings import Settings, resolve
from izh.kernels.cpu.row_limits import ANY_ROWS
from izh.kernels.select import select, tuned
from izh.model.decoder import Decoder
from izh.model.load import load_decoder, load_spec
from izh.model.source import ModelSource
from izh.request import Output, Request, SamplingParams

KERNELS = {
    "as measured": {},
    "izh's": {"kernel_rows": ANY_ROWS},
    "oneDNN's": {"kernel_rows": 0, "pack_weights": True},
    "torch's": {"kernel_rows": 0, "pack_weights": False},
    "both": {"kernel_rows": 3, "pack_weights": True},
}
"""Options that force each choice of kernel for the linear layers."""


@dataclass
class Loaded:
    """A model in memory; `engine` puts a fresh engine (empty cache) around it."""

    settings: Settings
    model: Decoder
    fingerprint: bytes

    def engine(self, *, num_blocks: int = 512, **limits: object) -> EngineCore:
        settings = replace(self.settings, num_blocks=num_blocks, limits=replace(self.settings.limits, **limits))
        return compose(settings, self.model, self.fingerprint)


def load(source: ModelSource, **options: object) -> Loaded:
    spec = load_spec(source)
    settings = resolve(EngineOptions(kv_cache_gb=0.5, **options), spec)
    ops = tuned(select(settings.device, settings.kernels), spec.hidden_size, settings.kernel_rows)
    model, fingerprint = load_decoder(
        source, spec, ops, settings.device, settings.dtype, quiet=True, quantization=settings.quantization
    )
    if settings.packs_weights:
        model.pack()
    model.join()
    return Loaded(settings, model, fingerprint)


def request(name: str, prompt: list[int], *, arrival: float = 0.0, choice: int = 0, **params: object) -> Request:
    options = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**options), arrival_s=arrival, choice=choice)


def run(engine: EngineCore, *requests: Request, limit: int = 10_000) -> dict[str, Output]:
    """Add the requests, step until all are finished, and sum up each one's outputs."""
    for each in requests:
        engine.add(each)
    return drain(engine, limit)


def drain(engine: EngineCore, limit: int = 10_000) -> dict[str, Output]:
    done: dict[str, Output] = {}
    for _ in range(limit):
        if not engine.has_work:
            return done
        for output in engine.step():
            whole = done.setdefault(output.request_id, output)
            if whole is output:
                whole.token_ids = list(whole.token_ids)
                continue
            whole.token_ids += output.token_ids
            whole.logprobs = (whole.logprobs or []) + output.logprobs if output.logprobs is not None else whole.logprobs
            whole.finish = output.finish
    raise AssertionError(f"still busy after {limit} steps")
