"""How rows become a vector, and what goes before a text: everything about an embedding model but its encoder.

Owns: Recipe, and the reading of sentence-transformers' directories (`read_sentence_files`, `read_reranker_files`).
Must not know: encoders, requests.
Invariant: every module and field that changes a vector is honoured, or loading fails with a ModelLoadError naming it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from izh.errors import ModelLoadError
from izh.model.projections import Dense, LayerNorm, read_json
from izh.request import PoolingMode

Stage = Callable[[Tensor], Tensor]
"""vectors [S, K] -> [S, N]."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Pool by `modes` (side by side), pass the `stages`, cut to `truncate_dim`, then normalize."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    stages: tuple[Stage, ...] = ()
    normalize: bool = True
    truncate_dim: int | None = None
    dimensions: tuple[int, ...] | None = None
    """Widths that the model was trained to be cut to; () is any width, None is no other than its own."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    includes_prompt: bool = True  # whether the prompt's tokens are pooled too


@dataclass(frozen=True, kw_only=True)
class SentenceFiles:
    """What a model directory says besides weights. `transformer` holds config, weights and tokenizer."""

    recipe: Recipe
    transformer: Path
    max_seq_length: int | None = None
    lower_case: bool = False


_MODES: dict[str, PoolingMode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_FLAGS = {  # the older spelling: one flag for each mode, in the order in which they are put side by side
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TRANSFORMER_FILES = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_KEPT_APART = {"max_seq_length", "do_lower_case"}
_NO_CHANGE: dict[str, dict[str, Any]] = {  # fields of the transformer's file that say what is computed anyway
    "feature-extraction": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    },
    "sequence-classification": {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    },
}


def read_sentence_files(directory: Path) -> SentenceFiles:
    """What a directory asks for; one without modules.json is mean pooling and a vector of length 1."""
    config = _maybe_json(directory / "config_sentence_transformers.json")
    if not (directory / "modules.json").is_file():
        files = SentenceFiles(recipe=Recipe(), transformer=directory)
    else:
        files = _from_modules(directory, read_json(directory / "modules.json"))
    prompts = {name: text for name, text in (config.get("prompts") or {}).items() if text is not None}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"{directory / 'config_sentence_transformers.json'}: default_prompt_name {default!r} is none of "
            f"{', '.join(prompts) or 'no prompts'}"
        )
    recipe = replace(
        files.recipe,
        prompts=prompts,
        default_prompt_name=default,
        truncate_dim=config.get("truncate_dim"),
        dimensions=_dimensions(config | _maybe_json(files.transformer / "config.json")),
    )
    return replace(files, recipe=recipe)


def read_reranker_files(directory: Path) -> tuple[SentenceFiles, str | None]:
    """What a cross-encoder's directory asks for, and the dotted name of the activation that its scores pass, if any."""
    path = directory / "modules.json"
    if not path.is_file():  # then sentence-transformers reads no other file of its own either
        return SentenceFiles(recipe=Recipe(), transformer=directory), None
    modules = read_json(path)
    if kinds := [kind for module in modules if (kind := _kind(module, path)) != "Transformer"]:
        raise ModelLoadError(f"{path}: module {kinds[0]} is not supported in a reranker")
    saved = _maybe_json(directory / "config_sentence_transformers.json")
    if prompt := (saved.get("prompts") or {}).get(saved.get("default_prompt_name")):
        raise ModelLoadError(f"{directory}: a prompt before every pair ({prompt!r}) is not supported")
    folder = directory / modules[0]["path"]
    max_seq_length, lower_case = _transformer(folder, "sequence-classification")
    files = SentenceFiles(recipe=Recipe(), transformer=folder, max_seq_length=max_seq_length, lower_case=lower_case)
    return files, saved.get("activation_fn")


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    listed = config.get("matryoshka_dimensions")
    if listed:
        return tuple(listed)
    return () if config.get("is_matryoshka") else None


def _from_modules(directory: Path, modules: list[dict[str, Any]]) -> SentenceFiles:
    path = directory / "modules.json"
    kinds = [_kind(module, path) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ModelLoadError(f"{path}: {', '.join(kinds)} is not supported; it must begin with Transformer, Pooling")
    folders = [directory / module["path"] for module in modules]
    modes, includes_prompt = _pooling(folders[1] / "config.json")
    stages: list[Stage] = []
    for kind, folder in zip(kinds[2:], folders[2:], strict=True):
        if kind == "Dense":
            stages.append(Dense(folder))
        elif kind == "LayerNorm":
            stages.append(LayerNorm(folder))
        elif kind == "Normalize":
            stages.append(_to_length_one)
        elif kind != "Dropout":
            raise ModelLoadError(f"{path}: module {kind} is not supported")
    normalize = bool(stages) and stages[-1] is _to_length_one
    max_seq_length, lower_case = _transformer(folders[0], "feature-extraction")
    return SentenceFiles(
        recipe=Recipe(
            modes=modes,
            stages=tuple(stages[:-1] if normalize else stages),
            normalize=normalize,
            includes_prompt=includes_prompt,
        ),
        transformer=folders[0],
        max_seq_length=max_seq_length,
        lower_case=lower_case,
    )


def _to_length_one(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=-1)


def _kind(module: Mapping[str, Any], path: Path) -> str:
    package, _, kind = module["type"].rpartition(".")
    if package.split(".")[0] != "sentence_transformers":
        raise ModelLoadError(f"{path}: module {module['type']!r} is code of the checkpoint, which is never run")
    return kind


def _pooling(path: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    config = read_json(path)
    named = config.get("pooling_mode")
    if named is None:
        named = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    elif isinstance(named, str):
        named = [named]
    if unknown := [mode for mode in named if mode not in _MODES]:
        raise ModelLoadError(f"{path}: pooling mode {unknown[0]!r} is not supported; supported: {', '.join(_MODES)}")
    return tuple(_MODES[mode] for mode in named), config.get("include_prompt", True)


def _transformer(folder: Path, task: str) -> tuple[int | None, bool]:
    path = next((folder / name for name in _TRANSFORMER_FILES if (folder / name).is_file()), None)
    if path is None:
        return None, False
    config = read_json(path)
    for name, value in config.items():
        if name not in _KEPT_APART and value and value != _NO_CHANGE[task].get(name):
            raise ModelLoadError(f"{path}: {name}={value!r} is not supported")
    return config.get("max_seq_length"), bool(config.get("do_lower_case"))


def _maybe_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
