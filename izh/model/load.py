"""From a model source to a spec and a decoder.

Owns: reading a checkpoint's config, and putting source, family, decoder and weights together.
Must not know: engines, features, how ops are chosen.
Invariant: everything the checkpoint asks for is computed, or loading fails with a ModelLoadError that names it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from izh.errors import ModelLoadError
from izh.kernels.ops import Ops
from izh.model.decoder import Decoder
from izh.model.families import family_of
from izh.model.gguf import read_gguf
from izh.model.quantize import Quantizer
from izh.model.source import ModelSource
from izh.model.spec import ModelSpec
from izh.model.weights import Safetensors, TensorSource, fill

_WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration")


def load_spec(source: ModelSource) -> ModelSpec:
    """The model's description, from its config; of the weights at most names are read.

    Raises ModelLoadError for an unknown model_type, or a config field that changes the maths and is not supported.
    """
    if source.kind == "gguf":
        config = read_gguf(source.path).config()
        eos = config.eos_token_id
    else:
        config = _read_config(source.path)
        text = getattr(config, "text_config", config)  # only image-text configs nest one
        eos = _generation_eos(source.path)
        eos = text.eos_token_id if eos is None else eos
    eos_token_ids = (eos,) if isinstance(eos, int) else tuple(eos or ())  # one id, a list, or None
    spec = family_of(config.model_type).to_spec(config, eos_token_ids)
    if source.kind == "directory" and not _has_lm_head(source.path, config, spec):
        return replace(spec, has_lm_head=False, tie_word_embeddings=True)
    return spec


def load_decoder(
    source: ModelSource,
    spec: ModelSpec,
    ops: Ops,
    device: torch.device | str,
    dtype: torch.dtype,
    quiet: bool = False,
    quantization: str | None = None,
) -> tuple[Decoder, bytes]:
    """The decoder with its weights, in few bits for a `quantization`, and their fingerprint for cache keys.

    Progress goes to stderr unless `quiet`. Raises ModelLoadError naming the tensor at fault.
    """
    decoder = Decoder(spec, ops, device, dtype)
    tensors: TensorSource
    if source.kind == "gguf":
        tensors = read_gguf(source.path)
        family = family_of(tensors.model_type)
    else:
        tensors = Safetensors(source.path)
        family = family_of(_raw_config(source.path)["model_type"])
    quantizer = None if quantization is None else Quantizer(decoder, quantization)
    fill(decoder, spec, family, tensors, quiet, (lambda parameter: None) if quantizer is None else quantizer.take)
    read_gguf.cache_clear()
    if quantizer is None:
        return decoder, tensors.fingerprint()
    quantizer.finish()
    return decoder, f"{quantization}:".encode() + tensors.fingerprint()


def _raw_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as a model config: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ModelLoadError(f"{path}: has no model_type")
    return raw


def _read_config(directory: Path) -> Any:
    """The transformers config object, which fills in what config.json leaves to class defaults."""
    raw = _raw_config(directory)
    family_of(raw["model_type"])  # named before transformers says it in its own words
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method")
        raise ModelLoadError(
            f"{directory / 'config.json'}: quantization_config (quant_method={method!r}) is not supported; "
            "use the unquantized checkpoint or a GGUF file"
        )
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelLoadError(f"{directory / 'config.json'}: {type(error).__name__}: {error}") from error


def _has_lm_head(directory: Path, config: Any, spec: ModelSpec) -> bool:
    """False for a model of hidden rows: by its class (MistralModel), or because it embeds (modules.json, of
    sentence-transformers) and none of its files holds the head that its class would have."""
    classes = getattr(config, "architectures", None) or ()
    if classes and not any(name.endswith(_WITH_HEAD) for name in classes):
        return False
    if spec.tie_word_embeddings or not (directory / "modules.json").is_file():
        return True
    return any(name.endswith("lm_head.weight") for name in Safetensors(directory).names())


def _generation_eos(directory: Path) -> int | list[int] | None:
    path = directory / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path}: not a generation config: {error}") from error
