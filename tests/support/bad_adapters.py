"""Adapter directories that must be refused, each wrong in one way, made from a good one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def _config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return _tensors(lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def _file(name: str, content: bytes | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return change


def _set(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor[0, 0] = value
    return tensor


def _renamed(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return _tensors(change)


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


A, B, WEIGHTS, CONFIG = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight", "adapter_model.safetensors", "adapter_config.json"

KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "peft_type": (_config(peft_type="IA3"), "peft_type"),
    "r zero": (_config(r=0), "json: r "),
    "r text": (_config(r="8"), "json: r "),
    "alpha null": (_config(lora_alpha="much"), "lora_alpha"),
    "unknown field": (_config(surprise=1), "surprise"),
    "qalora": (_config(use_qalora=True), "use_qalora"),
    "layer_replication": (_config(layer_replication=[[0, 2]]), "layer_replication"),
    "target_parameters": (_config(target_parameters=["x"]), "target_parameters"),
    "modules_to_save": (_config(modules_to_save=["score"]), "modules_to_save"),
    "init": (_config(init_lora_weights="pissa"), "init_lora_weights"),
    "bias": (_config(bias="some"), "bias"),
    "rslora": (_config(use_rslora="yes"), "use_rslora"),
    "rank_pattern": (_config(rank_pattern=["q_proj"]), "rank_pattern"),
    "alpha_pattern": (_config(alpha_pattern={"q_proj": "1"}), "alpha_pattern"),
    "pattern": (_config(rank_pattern={"(": 2}), "rank_pattern"),
    "no targets": (_config(target_modules=[]), "target_modules"),
    "regex": (_config(target_modules="("), "target_modules"),
    "zero matches": (_config(target_modules=["nothing"]), "does not target it"),
    "fewer targets": (_config(target_modules=["q_proj"]), "does not target it"),
    "exclude": (_config(exclude_modules=3), "exclude_modules"),
    "layers": (_config(layers_to_transform=[0]), "does not target it"),
    "layers text": (_config(layers_to_transform="all"), "layers_to_transform"),
    "rank": (_config(r=4), "expected (4"),
    "dora": (_config(use_dora=True), "magnitude is missing"),
    "no config": (_file(CONFIG, None), "adapter_config.json"),
    "config garbage": (_file(CONFIG, b"\xff\xfe{"), "cannot be read"),
    "config list": (_file(CONFIG, b"[]"), "JSON object"),
    "no weights": (_file(WEIGHTS, None), "neither adapter_model.safetensors nor"),
    "empty weights": (_file(WEIGHTS, b""), "cannot be read"),
    "garbage weights": (_file(WEIGHTS, b"\x00" * 64), "cannot be read"),
    "cut weights": (_cut, "cannot be read"),
    "pickle that acts": (_pickle, "cannot be read"),
    "no tensors": (_tensors(lambda tensors: tensors.clear()), "no weights"),
    "no A": (_tensors(lambda tensors: tensors.pop(A)), "a is missing"),
    "no B": (_tensors(lambda tensors: tensors.pop(B)), "b is missing"),
    "one module missing": (_tensors(lambda tensors: (tensors.pop(A), tensors.pop(B))), "without weights"),
    "nan": (_tensor(A, lambda a: _set(a, float("nan"))), "not finite"),
    "inf": (_tensor(B, lambda b: _set(b, float("inf"))), "not finite"),
    "overflow": (_config(lora_alpha=1e42), "not finite"),
    "whole numbers": (_tensor(A, lambda a: a.int()), "floating point"),
    "width": (_tensor(A, lambda a: a[:, :-1]), "expected"),
    "outputs": (_tensor(B, lambda b: b[:-1]), "expected"),
    "turned": (_tensor(A, lambda a: a.T), "expected"),
    "half the rank": (_tensor(A, lambda a: a[:4]), "expected"),
    "strange tensor": (_tensors(lambda tensors: tensors.update({f"{Q0}.lora_C.weight": torch.ones(1)})), "lora_C"),
    "no prefix": (_renamed("base_model.model.", ""), "not a LoRA weight"),
    "other model": (_renamed("model.layers", "transformer.h"), "no linear of this model"),
    "layer 99": (_renamed("layers.1.", "layers.99."), "no linear of this model"),
    "magnitude": (
        _tensors(lambda tensors: tensors.update({f"{Q0}.lora_magnitude_vector": torch.ones(64)})),
        "use_dora",
    ),
    "bias tensor": (_tensors(lambda tensors: tensors.update({f"{Q0}.base_layer.bias": torch.ones(64)})), "bias"),
    "two spellings": (
        _tensors(lambda tensors: tensors.update({f"{Q0}.lora_A.default.weight": tensors[A].clone()})),
        "twice",
    ),
}
"""Kind -> (how to spoil a good adapter, what the refusal must say)."""


def make_all(good: Path, root: Path) -> dict[str, tuple[Path, str]]:
    """A directory of every kind under `root`, and what its refusal must say."""
    made = {}
    for number, (kind, (spoil, text)) in enumerate(KINDS.items()):
        folder = root / f"bad{number}"
        shutil.copytree(good, folder)
        spoil(folder)
        made[kind] = (folder, text)
    return made
