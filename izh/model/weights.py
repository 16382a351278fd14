"""Weights: from named tensors into a decoder's parameters.

Owns: the plan of where each checkpoint tensor goes (`places`), filling the parameters from any stream of (name,
tensor) (`fill`), and the safetensors stream (`Safetensors`).
Must not know: configs, kernels, what a family is beyond its name table.
Invariant: after `fill` every element of every parameter has been written exactly once; a tensor that is missing,
unknown or of the wrong shape is an error that names it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from izh.errors import ModelLoadError
from izh.model.families.family import Family
from izh.model.spec import ModelSpec


class TensorSource(Protocol):
    """Where a checkpoint's tensors come from: names as in an HF checkpoint, one tensor at a time."""

    label: str  # what messages call it
    num_tensors: int

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every tensor once, the output head last."""
        ...

    def fingerprint(self) -> bytes:
        """Cheap identity of the contents: names, sizes and modification times of the files, and the config."""
        ...


@dataclass(frozen=True)
class Place:
    """Rows start .. start+count-1 of a parameter, and what is added to the checkpoint's values there."""

    parameter: str
    start: int
    count: int
    offset: float = 0.0


def places(family: Family, spec: ModelSpec, parameters: dict[str, nn.Parameter]) -> dict[str, Place]:
    """Checkpoint name (without prefix) -> its place, for every tensor this decoder needs."""
    q, k, v = spec.qkv_sizes
    width = spec.intermediate_size
    parts = {"q": (0, q), "k": (q, k), "v": (q + k, v), "gate": (0, width), "up": (width, width)}
    result: dict[str, Place] = {}
    for module, (target, part) in family.modules.items():
        for layer in range(spec.num_layers) if "{i}" in module else [0]:
            for suffix in ("weight", "bias"):
                parameter = f"{target.format(i=layer)}.{suffix}"
                if parameter in parameters:
                    start, count = (0, parameters[parameter].shape[0]) if part is None else parts[part]
                    offset = spec.norm_offset if target.endswith("norm") else 0.0
                    result[f"{module.format(i=layer)}.{suffix}"] = Place(parameter, start, count, offset)
    covered = Counter[str]()
    for place in result.values():
        covered[place.parameter] += place.count
    assert covered == {name: parameter.shape[0] for name, parameter in parameters.items()}, "table leaves rows unset"
    return result


def fill(
    decoder: nn.Module,
    spec: ModelSpec,
    family: Family,
    source: TensorSource,
    quiet: bool = False,
    after: Callable[[str], None] = lambda parameter: None,
) -> None:
    """Copy every tensor of `source` into the decoder, converting the dtype on the way. `after` is told of each
    parameter once it is whole, and may take it away, except for the embedding.

    Raises ModelLoadError naming the first tensor that has the wrong shape or that the decoder has no place for, or the
    ones that never came.
    """
    wanted = places(family, spec, dict(decoder.named_parameters()))
    unwritten = dict.fromkeys(wanted)
    missing_parts = Counter(place.parameter for place in wanted.values())
    for full_name, tensor in _with_progress(source, quiet):
        name = _without_prefix(full_name, family)
        if name is None or name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints carry along
            continue
        if name == "lm_head.weight" and spec.tie_word_embeddings:
            assert "embed_tokens.weight" not in unwritten, "sources stream the output head last"
            _check_tied(source, full_name, tensor, decoder.get_parameter("embed_tokens.weight"))
            continue
        place = wanted.get(name)
        if place is None:
            raise ModelLoadError(f"{source.label}: tensor {full_name!r} has no place in a {spec.model_type} model")
        if name not in unwritten:
            raise ModelLoadError(f"{source.label}: tensor {full_name!r} comes twice")
        target = decoder.get_parameter(place.parameter).narrow(0, place.start, place.count)
        if tensor.shape != target.shape:
            raise ModelLoadError(
                f"{source.label}: tensor {full_name!r} has shape {list(tensor.shape)}, "
                f"the config asks for {list(target.shape)}"
            )
        target.copy_(tensor if place.offset == 0.0 else tensor.float() + place.offset)
        del unwritten[name]
        missing_parts[place.parameter] -= 1
        if not missing_parts[place.parameter]:
            after(place.parameter)
    if unwritten:
        missing = list(unwritten)
        raise ModelLoadError(
            f"{source.label}: {len(missing)} tensors are missing, among them {', '.join(map(repr, missing[:3]))}"
        )


def _without_prefix(name: str, family: Family) -> str | None:
    """The name the family's table uses, or None for a tensor of another part of the model."""
    bare = name.removeprefix("model.")
    if bare.startswith(family.other_parts):
        return None
    for prefix in family.prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check_tied(source: TensorSource, name: str, tensor: Tensor, embedding: Tensor) -> None:
    """A tied checkpoint may carry its output head as well, as long as it is the embedding."""
    if tensor.shape != embedding.shape or not torch.equal(tensor.to(embedding), embedding):
        raise ModelLoadError(
            f"{source.label}: the config ties the output head to the embeddings (tie_word_embeddings), "
            f"but {name!r} differs from them; set tie_word_embeddings to false in the config if it should be used"
        )


def _with_progress(source: TensorSource, quiet: bool) -> Iterator[tuple[str, Tensor]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(source.label, total=source.num_tensors)
        for item in source.tensors():
            yield item
            progress.advance(task)


class Safetensors:
    """The safetensors files of a checkpoint directory: one `model.safetensors`, or shards named by an index.

    Tensors are views of the mapped files, so nothing is copied before it is put in its place.
    Raises ModelLoadError when there is no such file, or one that the index names is missing or unreadable.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.label = directory.name
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        if single.is_file():
            self.files = [single]
        elif index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise ModelLoadError(f"{index}: not a safetensors index: {error!r}") from error
            self.files = [directory / name for name in names]
        else:
            raise ModelLoadError(
                f"{directory}: no model.safetensors and no model.safetensors.index.json; only safetensors and GGUF "
                "checkpoints are read, convert others with transformers' save_pretrained"
            )
        for file in self.files:
            if not file.is_file():
                raise ModelLoadError(f"{file}: named by {index.name} but missing; download the checkpoint again")
        self.num_tensors = len(self.names())

    def names(self) -> list[str]:
        """Every tensor's name; no tensor is read."""
        return [name for file in self.files for name in self._open(file).keys()]  # noqa: SIM118  (not a dict)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        heads: list[tuple[Path, str]] = []
        for file in self.files:
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    if name.endswith("lm_head.weight"):
                        heads.append((file, name))
                    else:
                        yield name, opened.get_tensor(name)
        for file, name in heads:  # last, so that a tied head can be compared with the embeddings
            with self._open(file) as opened:
                yield name, opened.get_tensor(name)

    def fingerprint(self) -> bytes:
        digest = hashlib.sha256((self.directory / "config.json").read_bytes())
        for file in self.files:
            stat = file.stat()
            digest.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
        return digest.digest()

    def _open(self, file: Path):  # type: ignore[no-untyped-def]  # safetensors ships no type for its handle
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ModelLoadError(f"{file}: not a readable safetensors file: {error}") from error
