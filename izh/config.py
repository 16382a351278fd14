"""Options as users write them, grouped by concern.

Owns: the frozen option groups, from which the command line is generated (`cli.py`). `None` means "choose for me".
Must not know: torch, or how a choice is made: `engine/settings.py` resolves options once into `Settings`, and nothing
is written afterwards.

Every field carries its help line and, where only some values are allowed, its choices.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from izh.errors import OptionError

QUANTIZATIONS = ("int8", "int4")
"""The ways to hold weights in few bits."""


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, repeat: bool = False) -> Any:
    """A dataclass field with a help line; `repeat` marks a tuple-valued option whose flag may be given many times."""
    return field(default=default, metadata={"help": help, "choices": choices, "repeat": repeat})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is held in memory."""

    model: str = option("demo", "'demo', a directory, a hub id, or a .gguf file")
    revision: str | None = option(None, "hub revision (branch, tag or commit); default: the main branch")
    served_model_name: str | None = option(None, "name in /v1/models; default: the last part of the path")
    device: str | None = option(None, "where the model runs; default: cuda when present, else cpu", ("cpu", "cuda"))
    dtype: str | None = option(
        None, "weights and activations; default: fp32 on cpu, bf16 on cuda", ("fp32", "fp16", "bf16")
    )
    quantization: str | None = option(
        None,
        "hold the weights in 8 or 4 bits, also those of --embedder and --reranker, for twice the speed or so (CPU, "
        "fp32); 8 cost nearly nothing in quality, 4 only where the checkpoint had no more; default: as --dtype says",
        QUANTIZATIONS,
    )
    max_model_len: int | None = option(
        None, "longest prompt plus answer, in tokens; default: the model's own, if it fits"
    )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The paged KV cache."""

    kv_cache_gb: float | None = option(None, "GiB of memory for the KV cache; default: a share of what is free")
    block_size: int = option(16, "tokens per KV block")
    prefix_caching: bool = option(True, "reuse the KV of prompts that begin alike")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """What one step of the engine may hold."""

    max_num_seqs: int = option(64, "sequences running at once")
    max_num_batched_tokens: int = option(2048, "tokens computed in one step")
    priority_step_s: float = option(
        10.0, "seconds of waiting that one unit of request priority is worth; lower priority values run first"
    )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters beside the base model."""

    lora: tuple[str, ...] = option(
        (),
        'NAME=DIR, or {"name": NAME, "path": DIR}, of an adapter in PEFT\'s format; requests name it',
        repeat=True,
    )
    max_loras: int = option(8, "adapters on the device at once; more take turns")
    max_lora_rank: int = option(16, "highest rank of an adapter")
    lora_host_gb: float | None = option(
        None,
        "GiB of host memory for adapters; beyond it those unused for longest are read again when asked for; "
        "default: a quarter of what is free",
    )
    allow_runtime_lora: bool = option(False, "let clients load and unload adapters (POST /v1/load_lora_adapter)")
    lora_root: str | None = option(
        None, "directory in which adapters that clients load must lie; default: none, and no client can load any"
    )


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Which implementation of each op, and how many cores."""

    kernels: str | None = option(
        None,
        "op implementation; default: numba on cpu, triton on cuda if it is installed",
        ("reference", "numba", "triton"),
    )
    kernel_rows: int | None = option(
        None,
        "rows of a step up to which izh's own kernel computes the linear layers, and beyond which oneDNN or MKL does "
        "(CPU, fp32); default: measured at the first start",
    )
    pack_weights: bool | None = option(
        None,
        "keep the projections' weights a second time in the order that makes prompts fastest (CPU, fp32); "
        "default: on when a quarter of the free memory holds them",
    )
    deterministic: bool = option(
        False,
        "compute each row in one order of arithmetic, so that a request's logits are the same to the last bit whatever "
        "runs beside it (CPU, fp32; prompts take longer)",
    )
    num_threads: int | None = option(None, "CPU threads of the engine; default: the cores this process may use")


RESIDENT = "resident"
"""What --reranker says when the generator itself is to rerank."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The HTTP face."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    api_key: str | None = option(None, "require 'Authorization: Bearer KEY'; default: the variable IZH_API_KEY, if set")
    max_body_mb: float = option(32.0, "largest request body, in MiB")
    max_concurrent_requests: int = option(512, "requests in flight before new ones are answered 429")
    vision: str | None = option(
        None,
        "directory of a trained VisionPath, through which a text model sees, or 'demo'; default: none, but the demo's",
    )
    max_images: int = option(16, "images in one request")
    max_image_mb: float = option(16.0, "largest image as it is sent (compressed, before base64), in MiB")
    max_image_pixels: int = option(36_000_000, "largest image in pixels, by what its header says, before it is decoded")
    image_cache_mb: float = option(256.0, "MiB of encoded images kept for when they come again; 0 keeps none")
    allow_image_hosts: tuple[str, ...] = option(
        (),
        "host that images may be fetched from over https, *.NAME for all below it; may be given many times; "
        "default: none, images come with the request",
        repeat=True,
    )
    image_root: str | None = option(
        None, "directory that images may be read from, as file URLs; default: none, no file is read"
    )
    embedder: str | None = option(
        None,
        "directory of a model for /v1/embeddings, or 'demo' (all-MiniLM-L6-v2); default: the demo's beside the demo, "
        "else the generator embeds",
    )
    reranker: str | None = option(
        None,
        "directory of a cross-encoder for /v1/rerank and /v1/score, or 'demo', or 'resident': the generator judges "
        "(Qwen3-Reranker); default: none, but the demo's",
    )
    pool_max_wait_ms: float = option(0.0, "milliseconds that embeddings and reranks may wait for others to join them")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions, CacheOptions, ScheduleOptions, AdapterOptions, KernelOptions):
    """Everything an engine needs: what `LLM(...)` and `AsyncLLM(...)` take as keywords."""


def lora_directories(options: AdapterOptions) -> dict[str, Path]:
    """The adapters to load, by name. Raises OptionError for what is neither NAME=DIR nor the same in JSON, and for a
    name given twice."""
    directories: dict[str, Path] = {}
    for text in options.lora:
        name, directory = _from_json(text) if text.lstrip().startswith("{") else text.partition("=")[::2]
        if not (name and directory):
            raise OptionError(f"--lora takes NAME=DIR, got {text!r}")
        if name in directories:
            raise OptionError(f"--lora names {name!r} twice; an adapter's name must be its own")
        directories[name] = Path(directory).expanduser()
    return directories


def _from_json(text: str) -> tuple[str, str]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise OptionError(f"--lora {text!r} is not valid JSON: {error}") from error
    if set(fields) != {"name", "path"} or not all(isinstance(value, str) for value in fields.values()):
        raise OptionError(f'--lora takes {{"name": NAME, "path": DIR}}, both texts and nothing else, got {text!r}')
    return fields["name"], fields["path"]


def option_fields(*groups: type) -> list[Any]:
    """The dataclass fields of the groups, in order, each with `metadata['help']`."""
    return [f for group in groups for f in fields(group)]
