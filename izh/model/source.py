"""Where a model lies: from what the user wrote to files on this machine.

Owns: ModelSource and its resolution ('demo', a directory, a .gguf file, or a hub id).
Must not know: configs, weights.
Invariant: a ModelSource's path exists and holds a whole checkpoint's files; nothing is downloaded after `resolve`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from izh.errors import ModelLoadError
from izh.model.demo import demo_adapters, demo_directory

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
"""What is fetched from a hub repository: configs, tokenizer files, chat templates, safetensors weights."""
HUB_EXCEPT = ["consolidated*", "original/*", "onnx/*", "openvino/*"]
"""Second copies of the weights in other layouts, which some repositories also carry."""

SourceKind = Literal["directory", "gguf"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on this machine. `name` is what it is served as unless the user says otherwise.

    `adapters` come with the model, and are loaded with it: name -> directory as PEFT saves it.
    """

    path: Path
    name: str
    kind: SourceKind
    adapters: Mapping[str, Path] = field(default_factory=dict)


def resolve(model: str, revision: str | None = None) -> ModelSource:
    """Find, and if need be fetch, what `model` names.

    Raises ModelLoadError saying what to do next when it cannot be had.
    """
    if model == "demo":
        return ModelSource(path=demo_directory(), name="demo", kind="directory", adapters=demo_adapters())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path}: has no config.json, so it is not a model directory")
        return ModelSource(path=path, name=path.resolve().name, kind="directory")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path}: is not a .gguf file; give the directory of an HF checkpoint instead")
        return ModelSource(path=path, name=path.stem, kind="gguf")
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"{path}: no such file or directory")
    return ModelSource(path=_from_hub(model, revision), name=model.rsplit("/", 1)[-1], kind="directory")


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_EXCEPT))
    except GatedRepoError as error:
        raise ModelLoadError(f"{what} is gated: accept its terms on the hub, then run: hf auth login") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{what} does not exist; check --revision") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"{what} is neither 'demo', nor a directory or .gguf file here, nor a repository on the hub; "
            "check the spelling, or for a private one run: hf auth login"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"{what} is not in the local hub cache and could not be fetched ({type(error).__name__}). "
            f"With network access, unset HF_HUB_OFFLINE or run: hf download {model}"
            + (f" --revision {revision}" if revision else "")
            + "; or give the path of a local directory"
        ) from error
