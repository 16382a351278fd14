"""What is served, as the frontend knows it.

Owns: ModelInfo and how it follows from the options, the source and what the engine process said when it was built.
Must not know: requests, processes, HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from izh.config import EngineOptions
from izh.engine.messages import Ready
from izh.errors import OptionError
from izh.model.source import ModelSource


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is served. `max_model_len` counts prompt and answer tokens."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    generates: bool = True  # False: the checkpoint has no LM head, prompts can only be pooled
    adapters: Mapping[str, Path] = field(default_factory=dict)  # directories of those that requests may name
    lora_root: Path | None = None  # where adapters that clients load must lie; None: clients may load none


def describe(options: EngineOptions, source: ModelSource, ready: Ready) -> ModelInfo:
    """Raises OptionError when an adapter has the model's name."""
    adapters = paths(ready.adapters)
    name = options.served_model_name or source.name
    if name in adapters:
        raise OptionError(f"--lora names {name!r}, which is the model's name; an adapter's name must be its own")
    root = options.lora_root if options.allow_runtime_lora else None
    return ModelInfo(
        name=name,
        path=str(source.path),
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        generates=ready.generates,
        adapters=adapters,
        lora_root=None if root is None else Path(root).expanduser().resolve(),
    )


def paths(directories: Mapping[str, str]) -> dict[str, Path]:
    """Directories as they travel, as paths."""
    return {name: Path(directory) for name, directory in directories.items()}
