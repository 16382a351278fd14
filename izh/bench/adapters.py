"""Random adapters to measure with, on disk in PEFT's format.

Owns: their weights. Must not know: engines.
Invariant: the same model, shape and index give the same adapter at every run; different indices give different ones.

A keeps the size of what it reads, and B A x is about `STRENGTH` times as large as x. At 0.7 the demo model still writes
words, and 64 adapters lead a prompt to 64 answers within 12 tokens; at 0.2 many agree, at 1 it raves.
Values are stored in float16, which every reader widens without loss.
"""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from izh.adapters.sites import targets_of
from izh.bench.shapes import AdapterShape
from izh.config import AdapterOptions
from izh.errors import OptionError
from izh.model.spec import ModelSpec

STRENGTH = 0.7
_FILE, _PREFIX = "adapter_model.safetensors", "base_model.model."
_SCALE = 2  # lora_alpha / r, as most adapters are trained


def write_adapters(folder: Path, spec: ModelSpec, shape: AdapterShape, count: int) -> Iterator[Path]:
    """Write adapters 0 .. count-1 into directories of their own, one as each is asked for."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": _SCALE * shape.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(shape.targets),
        "inference_mode": True,
    }
    for index in range(count):
        directory = folder / f"adapter-{index}"
        directory.mkdir()
        save_file(_weights(spec, shape, index), directory / _FILE)
        (directory / "adapter_config.json").write_text(json.dumps(config))
        yield directory


def refuse_others(engine: AdapterOptions) -> None:
    """Raises OptionError for options about adapters: a benchmark that makes its own decides them itself."""
    for field in fields(AdapterOptions):
        if getattr(engine, field.name) != field.default:
            flag = "--" + field.name.replace("_", "-")
            raise OptionError(f"{flag} is not for this command, which makes its own adapters: see --adapters, --shape")


def adapted_modules(directory: Path) -> set[str]:
    """The modules that a written adapter changes, as transformers names them."""
    with safe_open(directory / _FILE, "pt") as file:
        keys: list[str] = file.keys()
    return {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in keys}


def _weights(spec: ModelSpec, shape: AdapterShape, index: int) -> dict[str, Tensor]:
    """A [r, K] and B [D, r] of every target, under PEFT's names."""
    generator = torch.Generator().manual_seed(index)
    tensors = {}
    for path, (inputs, outputs) in targets_of(spec).items():
        if path.rpartition(".")[2] not in shape.targets:
            continue
        a = torch.randn(shape.rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, shape.rank, generator=generator) * (STRENGTH / _SCALE / shape.rank**0.5)
        module = f"{_PREFIX}model.{path}"
        tensors[f"{module}.lora_A.weight"] = a.half()
        tensors[f"{module}.lora_B.weight"] = b.half()
    return tensors
