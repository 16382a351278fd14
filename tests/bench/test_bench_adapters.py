"""The adapters that are measured: what is on disk, and that it is read as it was meant."""

import json
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file

from izh.adapters.peft import read_peft
from izh.adapters.sites import targets_of
from izh.bench.adapters import STRENGTH, write_adapters
from izh.bench.shapes import SHAPES
from izh.model.load import load_spec
from izh.model.source import resolve
from izh.model.spec import ModelSpec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return load_spec(resolve(str(tiny_checkpoint.save_llama(tmp_path_factory.mktemp("bench-adapters")))))


@pytest.mark.parametrize("name", SHAPES)
def test_they_have_their_shape(spec: ModelSpec, tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    (directory,) = write_adapters(tmp_path, spec, shape, 1)
    adapter = read_peft(directory, targets_of(spec))
    paths = [path for path in targets_of(spec) if path.rpartition(".")[2] in shape.targets]
    assert sorted(adapter.deltas) == sorted(paths)
    assert len(paths) == spec.num_layers * len(shape.targets)
    assert {delta.rank for delta in adapter.deltas.values()} == {shape.rank}


def test_they_change_what_they_read_by_their_strength(spec: ModelSpec, tmp_path: Path) -> None:
    (directory,) = write_adapters(tmp_path, spec, SHAPES["r16-all"], 1)
    torch.manual_seed(0)
    sizes = []
    for delta in read_peft(directory, targets_of(spec)).deltas.values():
        x = torch.randn(delta.a.shape[1], 256)
        sizes.append((delta.b @ delta.a @ x).square().mean().sqrt() / x.square().mean().sqrt())
    assert torch.stack(sizes).mean() == pytest.approx(STRENGTH, rel=0.1)


def test_each_is_its_own_and_the_same_at_every_run(spec: ModelSpec, tmp_path: Path) -> None:
    digests = []
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        directories = write_adapters(tmp_path / run, spec, SHAPES["r8-qv"], 5)
        digests.append([read_peft(directory, targets_of(spec)).digest for directory in directories])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 5


def test_they_are_small_on_disk_and_say_what_they_are(spec: ModelSpec, tmp_path: Path) -> None:
    (directory,) = write_adapters(tmp_path, spec, SHAPES["r8-qv"], 1)
    tensors = load_file(directory / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 8, ["q_proj", "v_proj"])
