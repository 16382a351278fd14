"""Options become settings, once.

Owns: `resolve`, which makes every choice the user left open, in a commented order, and logs each; `Settings`.
Must not know: features, processes. Called by `engine/build.py`; nothing is written afterwards.
"""

import logging
import os
from dataclasses import dataclass

import psutil
import torch

from izh.config import QUANTIZATIONS, EngineOptions
from izh.errors import OptionError
from izh.kernels.select import default_kernels
from izh.model.spec import ModelSpec
from izh.schedule.scheduler import Limits

log = logging.getLogger("izh.settings")

GIB = 1024**3
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CPU_KV_SHARE, _CPU_KV_MAX = 0.25, 4 * GIB  # of the memory left after the weights
_PACKED_SHARE = 0.25  # of the memory left after the weights
_WEIGHT_BITS = {"int8": 8.5, "int4": 5}  # the scales included
_HOST_LORA_SHARE = 0.25  # of the memory that is free at start
_GPU_KV_SHARE = 0.85  # the rest holds activations and the allocator's slack


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the engine runs with. Units: bytes, tokens, blocks."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int
    kernels: str
    kernel_rows: int | None
    packs_weights: bool
    quantization: str | None
    max_model_len: int
    num_blocks: int
    lora_host_bytes: int
    limits: Limits


def resolve(options: EngineOptions, spec: ModelSpec, num_feature_values: int = 0) -> Settings:
    """Choose everything that is None. `num_feature_values` counts the numbers that features keep on the device beside
    the weights, in the weights' format. Raises OptionError naming the option, its value and the limit."""
    # 1. Where: everything else depends on it.
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine, or this build of torch, has no CUDA device; use --device cpu")
    # 2. Number format: half precision matmuls are hundreds of times slower on CPUs without units for them.
    dtype = _DTYPES[options.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    # 3. Kernels and cores.
    kernels = options.kernels or default_kernels(device)
    if options.deterministic:
        if kernels != "numba" or dtype != torch.float32:
            raise OptionError("--deterministic is for --device cpu, --dtype fp32 and --kernels numba")
        kernels = "deterministic"
    if options.kernel_rows is not None and (options.kernel_rows < 0 or kernels != "numba" or options.quantization):
        raise OptionError(
            f"--kernel-rows {options.kernel_rows}: it is a number from 0 on, for --device cpu and --kernels numba, "
            "without --quantization and --deterministic"
        )
    num_threads = options.num_threads or len(os.sched_getaffinity(0))
    if num_threads < 1:
        raise OptionError(f"--num-threads must be at least 1, got {num_threads}")
    # 4. The step.
    limits = _limits(options)
    # 5. A second copy of the weights, for prompts.
    _check_quantization(options, device, dtype, kernels)
    can_pack = dtype == torch.float32 and kernels == "numba" and options.quantization is None
    packs_weights = _packs_weights(options, spec, can_pack)
    packed_bytes = projection_bytes(spec, dtype) if packs_weights else 0
    weights_held = held_bytes(spec, dtype, options.quantization)
    # 6. KV memory, from what the weights leave.
    block_bytes = kv_block_bytes(spec, options.block_size, dtype)
    feature_bytes = num_feature_values * dtype.itemsize
    kv_bytes = _kv_bytes(options, weights_held + packed_bytes + feature_bytes, device)
    num_blocks = kv_bytes // block_bytes
    # 7. Host memory for adapters beyond the device's slots.
    lora_host_bytes = _lora_host_bytes(options)
    # 8. Context: the model's own, cut to what the KV cache holds; a length the user asked for must fit.
    max_model_len = _max_model_len(options, spec, num_blocks, block_bytes)
    settings = Settings(
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        kernels=kernels,
        kernel_rows=options.kernel_rows,
        packs_weights=packs_weights,
        quantization=options.quantization,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        lora_host_bytes=lora_host_bytes,
        limits=limits,
    )
    log.info("device %s, %s, %s kernels, %d threads", device, str(dtype).removeprefix("torch."), kernels, num_threads)
    if packs_weights:
        log.info("weights: projections kept a second time for prompts (%.2f GiB)", packed_bytes / GIB)
    if num_feature_values:
        log.info(
            "adapters: %d slots of rank %d (%.2f GiB), %.2f GiB of host memory",
            options.max_loras,
            options.max_lora_rank,
            feature_bytes / GIB,
            lora_host_bytes / GIB,
        )
    log.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB, %d tokens)",
        num_blocks,
        options.block_size,
        num_blocks * block_bytes / GIB,
        num_blocks * options.block_size,
    )
    log.info("context: %d tokens (model: %d)", max_model_len, spec.max_length)
    log.info("step: at most %d sequences, %d tokens", limits.max_num_seqs, limits.max_num_batched_tokens)
    return settings


def kv_block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers: keys and values."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * block_size * dtype.itemsize


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the matrices (norms and biases are noise beside them)."""
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    return projection_bytes(spec, dtype) + embeddings * dtype.itemsize


def projection_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the layers' matrices."""
    query, key, value = spec.qkv_sizes
    layer = spec.hidden_size * (2 * query + key + value + 3 * spec.intermediate_size)
    return spec.num_layers * layer * dtype.itemsize


def held_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: str | None) -> int:
    """Bytes of the matrices as they are held: embedding and head never in less than 8 bits."""
    if quantization is None:
        return weight_bytes(spec, dtype)
    projections = projection_bytes(spec, dtype)
    ends = weight_bytes(spec, dtype) - projections
    bits = projections * _WEIGHT_BITS[quantization] + ends * _WEIGHT_BITS["int8"]
    return int(bits / (8 * dtype.itemsize))


def _packs_weights(options: EngineOptions, spec: ModelSpec, can_pack: bool) -> bool:
    if options.pack_weights is None:
        free = psutil.virtual_memory().available - weight_bytes(spec, torch.float32)
        return can_pack and projection_bytes(spec, torch.float32) <= free * _PACKED_SHARE
    if options.pack_weights and not can_pack:
        raise OptionError(
            "--pack-weights is for --device cpu, --dtype fp32 and --kernels numba, without --quantization and "
            "--deterministic"
        )
    return options.pack_weights


def _check_quantization(options: EngineOptions, device: torch.device, dtype: torch.dtype, kernels: str) -> None:
    if options.quantization is None:
        return
    if options.quantization not in QUANTIZATIONS:
        raise OptionError(f"--quantization {options.quantization!r} is not known; {' and '.join(QUANTIZATIONS)} are")
    if device.type != "cpu" or dtype != torch.float32 or kernels == "triton":
        raise OptionError(
            f"--quantization {options.quantization} is for --device cpu, --dtype fp32 and --kernels numba or "
            f"reference; got {device}, {str(dtype).removeprefix('torch.')}, {kernels}"
        )


def _kv_bytes(options: EngineOptions, taken: int, device: torch.device) -> int:
    if options.kv_cache_gb is not None:
        if options.kv_cache_gb <= 0:
            raise OptionError(f"--kv-cache-gb must be above 0, got {options.kv_cache_gb:g}")
        return int(options.kv_cache_gb * GIB)
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int((free - taken) * _GPU_KV_SHARE)
    free = psutil.virtual_memory().available - taken
    return int(min(max(free, 0) * _CPU_KV_SHARE, _CPU_KV_MAX))


def _lora_host_bytes(options: EngineOptions) -> int:
    if options.allow_runtime_lora and options.lora_root is None:
        raise OptionError("--allow-runtime-lora needs --lora-root, the directory in which such adapters must lie")
    if options.lora_host_gb is None:
        return int(psutil.virtual_memory().available * _HOST_LORA_SHARE)
    if options.lora_host_gb <= 0:
        raise OptionError(f"--lora-host-gb must be above 0, got {options.lora_host_gb:g}")
    return int(options.lora_host_gb * GIB)


def _max_model_len(options: EngineOptions, spec: ModelSpec, num_blocks: int, block_bytes: int) -> int:
    capacity = num_blocks * options.block_size
    if capacity < 2:
        raise OptionError(
            f"no room for the KV cache: one block of {options.block_size} tokens takes {block_bytes} bytes; "
            "free memory or raise --kv-cache-gb"
        )
    if options.max_model_len is None:
        return min(spec.max_length, capacity)
    if options.max_model_len < 2:
        raise OptionError(f"--max-model-len must be at least 2 (a prompt and an answer), got {options.max_model_len}")
    if options.max_model_len > spec.max_length:
        raise OptionError(f"--max-model-len {options.max_model_len} exceeds the model's {spec.max_length} tokens")
    if options.max_model_len > capacity:
        needed = -(-options.max_model_len // options.block_size) * block_bytes / GIB
        raise OptionError(
            f"--max-model-len {options.max_model_len} needs {needed:.2f} GiB of KV cache, which holds {capacity} "
            f"tokens: raise --kv-cache-gb to {needed:.2f} or lower --max-model-len to {capacity}"
        )
    return options.max_model_len


def _limits(options: EngineOptions) -> Limits:
    for name in ("max_loras", "max_lora_rank"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.block_size < 1:
        raise OptionError(f"--block-size must be at least 1, got {options.block_size}")
    if options.max_num_seqs < 1:
        raise OptionError(f"--max-num-seqs must be at least 1, got {options.max_num_seqs}")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise OptionError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens} is below --max-num-seqs "
            f"{options.max_num_seqs}: each running sequence needs one token a step"
        )
    return Limits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        prefix_caching=options.prefix_caching,
        priority_step_s=options.priority_step_s,
    )
