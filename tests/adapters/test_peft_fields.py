"""Every field of the installed PEFT's LoraConfig is honoured, harmless at any value, or refused by name and value."""

import dataclasses
import json

import adapters_made
import pytest
import tiny_checkpoint
from peft import LoraConfig

from izh.adapters.peft import read_peft
from izh.adapters.peft_config import PeftConfig
from izh.adapters.peft_fields import HARMLESS
from izh.adapters.sites import targets_of
from izh.errors import AdapterError
from izh.model.load import load_spec
from izh.model.source import resolve

HARMLESS_VALUES = {  # something else than what the made adapter says
    "task_type": "CAUSAL_LM",
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
    "peft_version": "0.1",
    "base_model_name_or_path": "elsewhere",
    "revision": "main",
    "inference_mode": False,
    "lora_dropout": 0.7,
    "runtime_config": {"ephemeral_gpu_offload": True},
    "megatron_core": "elsewhere",
    "qalora_group_size": 32,
    "eva_config": {"rho": 1.5},
    "corda_config": {"verbose": True},
    "lora_ga_config": {"scale": "unit"},
}
REFUSED_VALUES = {
    "fan_in_fan_out": True,
    "init_lora_weights": "pissa",
    "megatron_config": {"a": 1},
    "loftq_config": {"loftq_bits": 4},
    "velora_config": {"scale": 1.0},
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "monteclora_config": {"num_samples": 1},
    "layer_replication": [[0, 2]],
    "target_parameters": ["x"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 1},
    "kasa_config": {"beta": 1},
}
HONOURED = set(PeftConfig.__dataclass_fields__)  # each against PEFT in test_peft_parity and test_peft_rows
OTHER = {"peft_type"}  # LORA and nothing else


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapter(checkpoint, tmp_path):
    """Reads the made adapter with some fields of its config changed."""
    adapters_made.make(checkpoint, tmp_path, 1, target_modules=["q_proj"])
    targets = targets_of(load_spec(resolve(str(checkpoint))))
    file = tmp_path / "adapter_config.json"
    made = json.loads(file.read_text())

    def read(**fields):
        file.write_text(json.dumps(made | fields))
        return read_peft(tmp_path, targets)

    return read


def test_every_field_of_the_installed_peft_was_judged():
    judged = [HONOURED, set(HARMLESS_VALUES), set(REFUSED_VALUES), OTHER]
    assert {each.name for each in dataclasses.fields(LoraConfig)} == set().union(*judged)
    assert sum(map(len, judged)) == len(set().union(*judged))
    assert set(HARMLESS_VALUES) | OTHER == HARMLESS


def test_a_saved_config_holds_every_field_and_is_read(adapter, tmp_path):
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    unsaved = {"runtime_config"}
    assert saved.keys() | unsaved == {each.name for each in dataclasses.fields(LoraConfig)}
    assert adapter().deltas


@pytest.mark.parametrize("name", HARMLESS_VALUES)
def test_what_is_harmless_changes_nothing(adapter, name):
    assert adapter(**{name: HARMLESS_VALUES[name]}).digest == adapter().digest


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_what_is_not_honoured_is_refused_with_its_name_and_value(adapter, name):
    with pytest.raises(AdapterError) as caught:
        adapter(**{name: REFUSED_VALUES[name]})
    assert f"adapter_config.json: {name} = {REFUSED_VALUES[name]!r}" in str(caught.value)
