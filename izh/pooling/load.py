"""From a model directory to a ready service.

Owns: `load_embedder` and `load_reranker`: native encoders where we have the family, `transformers` elsewhere.
Must not know: HTTP, other features.
Invariant: the service computes what the checkpoint's own library computes, or loading fails with a ModelLoadError.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from izh.config import QUANTIZATIONS
from izh.errors import ModelLoadError, OptionError
from izh.kernels.memory import keep_freed_memory
from izh.kernels.ops import Ops
from izh.kernels.reference import REFERENCE
from izh.kernels.select import select
from izh.model.demo_embedder import DEMO_EMBEDDER, DEMO_RERANKER, demo_embedder_directory
from izh.model.encoders.adapted import Adapted
from izh.model.encoders.encoder import Encoder
from izh.model.encoders.load import load_encoder, read_encoder_config
from izh.model.encoders.spec import EncoderSpec, native_spec
from izh.model.encoders.tensors import EncoderTensors
from izh.model.projections import activation_of, read_json
from izh.model.weights import Safetensors
from izh.pooling.encoders import HFClassifier, HFEncoder, NativeEncoder, RemoteEncoder
from izh.pooling.matching import HEAD_FILE, MatchHead, MatchingEncoder
from izh.pooling.recipe import Recipe, SentenceFiles, read_reranker_files, read_sentence_files
from izh.pooling.service import PoolingService
from izh.text.encoding import EncoderTokenizer

log = logging.getLogger(__name__)

MAX_INPUTS = 2048
"""Inputs of one call for embeddings: the OpenAI API's limit."""
MAX_DOCUMENTS = 1000
"""Documents of one rerank: the Cohere API's limit."""


def load_embedder(
    directory: str | Path,
    *,
    model_name: str | None = None,
    max_model_len: int | None = None,
    max_batch: int = MAX_INPUTS,
    kernels: str | None = None,
    num_threads: int | None = None,
    quantization: str | None = None,
    elsewhere: RemoteEncoder | None = None,
    **options: Any,
) -> PoolingService:
    """The embedding service of a model directory, as `transformers` or sentence-transformers saves it; "demo" is
    all-MiniLM-L6-v2.

    `max_model_len` None: what the checkpoint says. `kernels` and `num_threads` None: chosen for this machine, as for
    the engine. `quantization` "int8" or "int4" holds the weights of the linear layers in 8 or 4 bits; an encoder that
    runs on `transformers` stays in float32, and the log says so. With `elsewhere`, which has loaded the same directory,
    no weights are read here. `options` go to PoolingService. Raises: ModelLoadError, OptionError.
    """
    folder = demo_embedder_directory() if str(directory) == "demo" else Path(directory).expanduser()
    files = read_sentence_files(folder)
    config = read_encoder_config(files.transformer)
    tokenizer = EncoderTokenizer.load(files.transformer, files.lower_case)
    spec = native_spec(config)
    encoder: NativeEncoder | HFEncoder | RemoteEncoder
    prepare: Callable[[], None] | None = None
    if elsewhere is not None:
        encoder = elsewhere
    else:
        ops = _ops(kernels, quantization)
        prepare = _preparation(ops, num_threads)
        if spec is None:
            _stays_whole(quantization, files.transformer, config)
            encoder = HFEncoder(_from_transformers("AutoModel", files.transformer, config))
        else:
            encoder = _native(load_encoder(files.transformer, spec, ops)[0])
    return PoolingService(
        encoder,
        tokenizer,
        model_name or folder.resolve().name,
        max_model_len=_max_length(files, config, spec, tokenizer, max_model_len),
        max_batch=max_batch,
        pad_id=tokenizer.pad_token_id or 0,
        recipe=files.recipe,
        vocab_size=config.vocab_size,
        prepare=prepare,
        **options,
    )


def load_reranker(
    directory: str | Path,
    *,
    model_name: str | None = None,
    max_model_len: int | None = None,
    max_batch: int = MAX_DOCUMENTS,
    kernels: str | None = None,
    num_threads: int | None = None,
    quantization: str | None = None,
    elsewhere: RemoteEncoder | None = None,
    **options: Any,
) -> PoolingService:
    """The reranking service of a sequence classifier with one label (a cross-encoder); arguments as `load_embedder`.
    "demo" is all-MiniLM-L6-v2 with an adapter and a head that come with izh (see examples/reranker).

    Scores pass through the activation that the checkpoint names, else the sigmoid, as in sentence-transformers.
    """
    folder = DEMO_RERANKER if str(directory) == "demo" else Path(directory).expanduser()
    if (folder / HEAD_FILE).is_file():
        return _load_matching(
            folder,
            model_name,
            max_model_len,
            kernels,
            num_threads,
            quantization,
            elsewhere,
            max_batch=max_batch,
            **options,
        )
    files, saved_activation = read_reranker_files(folder)
    config = read_encoder_config(files.transformer)
    path = files.transformer / "config.json"
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        raise ModelLoadError(f"{path}: architectures={config.architectures} has no sequence classifier to rerank with")
    if config.num_labels != 1:
        raise ModelLoadError(f"{path}: the classifier has {config.num_labels} labels; a reranker has one score")
    tokenizer = EncoderTokenizer.load(files.transformer, files.lower_case)
    spec = native_spec(config)
    encoder: NativeEncoder | HFEncoder | RemoteEncoder
    prepare: Callable[[], None] | None = None
    head: Callable[[Tensor], Tensor] | None = _as_it_is
    if elsewhere is not None:
        encoder = elsewhere
    else:
        ops = _ops(kernels, quantization)
        prepare = _preparation(ops, num_threads)
        if spec is None:
            _stays_whole(quantization, files.transformer, config)
            encoder = HFClassifier(_from_transformers("AutoModelForSequenceClassification", files.transformer, config))
        else:
            native, head = load_encoder(files.transformer, spec, ops, num_labels=1)
            encoder = _native(native)
    return PoolingService(
        encoder,
        tokenizer,
        model_name or folder.resolve().name,
        mode="cls" if spec is None else spec.head_pooling,
        normalize=False,
        score_head=head,
        score_activation=_score_activation(saved_activation, config, path),
        max_model_len=_max_length(files, config, spec, tokenizer, max_model_len),
        max_batch=max_batch,
        pad_id=tokenizer.pad_token_id or 0,
        vocab_size=config.vocab_size,
        prepare=prepare,
        **options,
    )


def _load_matching(
    folder: Path,
    model_name: str | None,
    max_model_len: int | None,
    kernels: str | None,
    num_threads: int | None,
    quantization: str | None,
    elsewhere: RemoteEncoder | None,
    **options: Any,
) -> PoolingService:
    """A reranker saved as what it adds to the demo embedder: an adapter as PEFT saves it, and a head for matches."""
    base = read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    if base != DEMO_EMBEDDER:
        raise ModelLoadError(
            f"{folder / 'adapter_config.json'}: made for {base!r}; a reranker with a {HEAD_FILE} is "
            f"one for {DEMO_EMBEDDER!r}"
        )
    files = SentenceFiles(recipe=Recipe(), transformer=demo_embedder_directory())
    config = read_encoder_config(files.transformer)
    tokenizer = EncoderTokenizer.load(files.transformer)
    spec = native_spec(config)
    assert spec is not None
    encoder: MatchingEncoder | RemoteEncoder
    prepare: Callable[[], None] | None = None
    if elsewhere is not None:
        encoder = elsewhere
    else:
        ops = _ops(kernels, quantization)
        prepare = _preparation(ops, num_threads)
        tensors = EncoderTensors(Adapted(Safetensors(files.transformer), folder))
        encoder = MatchingEncoder(_native(Encoder(spec, tensors, ops)), MatchHead(folder, spec.hidden_size))
        tensors.finish()
    return PoolingService(
        encoder,
        tokenizer,
        model_name or folder.resolve().name,
        mode="cls",
        normalize=False,
        score_head=_as_it_is,
        score_activation=torch.sigmoid,
        max_model_len=_max_length(files, config, spec, tokenizer, max_model_len),
        vocab_size=config.vocab_size,
        prepare=prepare,
        **options,
    )


def _ops(kernels: str | None, quantization: str | None) -> Ops:
    """The CPU's ops; in few bits what freezes a weight quantizes it. Raises OptionError for another quantization.

    With 8 bits activations are rounded in two digits: in one, vectors of MiniLM keep a cosine of only 0.998."""
    ops = select(torch.device("cpu"), kernels)
    if quantization is None:
        return ops
    if quantization not in QUANTIZATIONS:
        raise OptionError(f"quantization: {quantization!r} is not known; {' and '.join(QUANTIZATIONS)} are")
    form = "int8x2" if quantization == "int8" else quantization
    return replace(ops, freeze_linear=lambda weight, bias: ops.quantize_linear(weight, bias, form))


def _stays_whole(quantization: str | None, folder: Path, config: Any) -> None:
    """Say so: the option is about all models of a process, and one of them is no reason to refuse it to the others."""
    if quantization is not None:
        log.warning(
            "quantization %s: %s (%s) runs on transformers and stays in float32",
            quantization,
            folder,
            config.model_type,
        )


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


def _score_activation(saved: str | None, config: Any, path: Path) -> Callable[[Tensor], Tensor]:
    """As CrossEncoder of sentence-transformers chooses it: its own file, the config's two spellings, the sigmoid."""
    named = (
        saved
        or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
        or getattr(config, "sbert_ce_default_activation_function", None)
        or "torch.nn.Sigmoid"
    )
    return activation_of(named, path)


def _from_transformers(auto: str, folder: Path, config: Any) -> Any:
    import transformers

    log.info("%s: %s runs on transformers, padded; the native encoders do not cover it", folder, config.model_type)
    try:
        return getattr(transformers, auto).from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"{folder}: {type(error).__name__}: {error}") from error


def _max_length(
    files: SentenceFiles, config: Any, spec: EncoderSpec | None, tokenizer: EncoderTokenizer, asked: int | None
) -> int:
    """The least of what model, tokenizer and sentence-transformers' files allow; `asked` may exceed the latter two."""
    model = spec.max_length if spec is not None else getattr(config, "max_position_embeddings", None)
    if asked is not None:
        if asked < 1 or (model is not None and asked > model):
            raise ModelLoadError(f"max_model_len: {asked} is not between 1 and {model}, the positions of this model")
        return asked
    limits = [files.max_seq_length or tokenizer.model_max_length, *([model] if model else [])]
    return min(limits)


def _native(loaded: Encoder) -> NativeEncoder:
    """The encoder with its kernels compiled, so that the first request does not wait for that."""
    encoder = NativeEncoder(loaded)
    keep_freed_memory()
    encoder.packed(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1], dtype=torch.int32), None)
    return encoder


def _preparation(ops: Ops, num_threads: int | None) -> Callable[[], None] | None:
    """What sets the number of threads, in the thread that computes."""
    if num_threads is None:
        return None
    if ops.linear is REFERENCE.linear:
        return lambda: torch.set_num_threads(num_threads)
    from izh.kernels.cpu.threads import set_num_threads

    return lambda: set_num_threads(num_threads)
