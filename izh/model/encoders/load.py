"""From a checkpoint directory to an encoder.

Owns: reading an encoder's config, `load_encoder`.
Must not know: sentence-transformers' files, pooling.
Invariant: everything the checkpoint asks for is computed, or loading fails with a ModelLoadError that names it.
"""

from pathlib import Path
from typing import Any

from izh.errors import ModelLoadError
from izh.kernels.ops import Ops
from izh.model.encoders.encoder import Encoder
from izh.model.encoders.heads import ClassificationHead
from izh.model.encoders.spec import EncoderSpec
from izh.model.encoders.tensors import EncoderTensors
from izh.model.weights import Safetensors


def read_encoder_config(directory: Path) -> Any:
    """The transformers config object of a checkpoint. Raises ModelLoadError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{path}: missing, so {directory} is not a model directory")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelLoadError(f"{path}: {type(error).__name__}: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelLoadError(f"{path}: quantization_config is not supported; use the unquantized checkpoint")
    return config


def load_encoder(
    directory: Path, spec: EncoderSpec, ops: Ops, num_labels: int | None = None
) -> tuple[Encoder, ClassificationHead | None]:
    """The encoder with its weights in float32, and its classification head when `num_labels` asks for one.

    Raises ModelLoadError naming the tensor at fault.
    """
    tensors = EncoderTensors(Safetensors(directory))
    encoder = Encoder(spec, tensors, ops)
    head = None if num_labels is None else ClassificationHead(spec, num_labels, tensors, ops)
    tensors.finish()
    return encoder, head
