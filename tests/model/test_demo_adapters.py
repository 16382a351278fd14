"""The adapters that come with the demo model: whole, small, and free of the machine they were made on."""

import json

import pytest

from izh.adapters.peft import read_peft
from izh.adapters.sites import targets_of
from izh.config import AdapterOptions
from izh.model.demo import demo_adapters
from izh.model.load import load_spec
from izh.model.source import resolve

NAMES = ["json", "label", "pirate"]


def test_the_demo_model_comes_with_its_adapters() -> None:
    assert list(demo_adapters()) == NAMES
    assert resolve("demo").adapters == demo_adapters()


def test_another_model_comes_with_none(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)).adapters == {}


@pytest.mark.parametrize("name", NAMES)
def test_they_fit_the_model_and_the_default_rank(name: str) -> None:
    adapter = read_peft(demo_adapters()[name], targets_of(load_spec(resolve("demo"))))
    assert 0 < adapter.rank <= AdapterOptions().max_lora_rank


def test_no_two_are_the_same() -> None:
    targets = targets_of(load_spec(resolve("demo")))
    assert len({read_peft(directory, targets).digest for directory in demo_adapters().values()}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_small_and_say_only_what_they_are(name: str) -> None:
    files = {file.name: file for file in demo_adapters()[name].iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(file.stat().st_size for file in files.values()) < 1_000_000
    config = json.loads(files["adapter_config.json"].read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert not [value for value in config.values() if isinstance(value, str) and value.startswith(("/", "~"))]
