"""A checkpoint's vision tower and processor, as `transformers` defines them, without what surrounds them there.

Owns: loading the tower and projector without the language model, and the processor without its video half.
Must not know: families beyond the class names they give, prompts, the engine.
Invariant: every weight of the tower comes from the checkpoint, or loading fails with a ModelLoadError.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from izh.errors import ModelLoadError


def load_tower(directory: Path, dtype: torch.dtype) -> Any:
    """The checkpoint's base model (`Qwen2VLModel`, ...) with everything but the language model, for inference.

    The language model is built with no layers and a vocabulary of one, so its tensors are not read into memory:
    `transformers` finds and renames the tower's, whatever the age of the checkpoint.
    """
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    for name in ("layer_types", "no_rope_layers"):
        if getattr(text, name, None) is not None:
            setattr(text, name, [])
    try:
        with _quiet():
            model, found = AutoModel.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelLoadError(f"{directory}: the vision tower cannot be loaded: {error}") from error
    absent = sorted(name for name in found["missing_keys"] if not _is_text(name))
    wrong = sorted(name for name, *_ in found["mismatched_keys"] if not _is_text(name))
    if absent or wrong:
        what = f"lacks {absent[0]}" if absent else f"has another shape than its config for {wrong[0]}"
        raise ModelLoadError(f"{directory}: the checkpoint {what}, which the vision tower needs")
    return model.eval().requires_grad_(False)


def _is_text(name: str) -> bool:
    return "embed_tokens" in name or name.startswith(("language_model.", "text_model.", "lm_head."))


def load_processor(directory: Path, class_name: str) -> Any:
    """The checkpoint's processor: its image processor (on Pillow), tokenizer and chat template, as an instance of
    transformers' class of this name.

    Videos are not served, and transformers' video processors need torchvision; so there is none.
    """
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    parent = getattr(transformers, class_name)
    cls: Any = type(class_name, (parent,), {"check_argument_for_proper_class": lambda *_: None})
    try:
        with _quiet():
            parts = {
                "image_processor": AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True),
                "tokenizer": AutoTokenizer.from_pretrained(directory, local_files_only=True),
                "video_processor": None,
            }
            options, _ = cls.get_processor_dict(directory, local_files_only=True)
            arguments = [parts[name] for name in cls.get_attributes()]
            processor = cls.from_args_and_dict(arguments, options)
    except Exception as error:  # files of a checkpoint can be wrong in many ways, and `tokenizers` raises plain ones
        raise ModelLoadError(f"{directory}: the image processor cannot be loaded: {error}") from error
    if not (processor.chat_template or processor.tokenizer.chat_template):
        raise ModelLoadError(f"{directory}: has no chat template, which says where a prompt's images go")
    return processor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports as unexpected what is left out on purpose."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
