"""What is refused of a PEFT directory, each by name; what is honoured is tested through the engine."""

import json

import adapters_made
import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file, save_file

from izh.adapters.peft import read_peft
from izh.adapters.sites import decoder_sites, shapes_of
from izh.errors import AdapterError
from izh.kernels.reference import REFERENCE
from izh.model.decoder import Decoder
from izh.model.load import load_spec
from izh.model.source import resolve


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shapes(checkpoint):
    return shapes_of(decoder_sites(Decoder(load_spec(resolve(str(checkpoint))), REFERENCE, "meta")))


@pytest.fixture
def folder(checkpoint, tmp_path):
    adapters_made.make(checkpoint, tmp_path / "adapter", 1)
    return tmp_path / "adapter"


def edit_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(folder, edit):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_the_digest_is_of_the_effective_weights(folder, shapes):
    first = read_peft(folder, shapes)
    edit_config(folder, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    assert read_peft(folder, shapes).digest == first.digest
    edit_config(folder, lora_alpha=17)
    assert read_peft(folder, shapes).digest != first.digest


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"fan_in_fan_out": True},
        {"lora_bias": True},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"target_parameters": ["x"]},
        {"use_qalora": True},
        {"alora_invocation_tokens": [1]},
        {"megatron_config": {"a": 1}},
        {"init_lora_weights": "pissa"},
        {"loftq_config": {"bits": 4}},
        {"arrow_config": {"k": 1}},
        {"a_field_from_the_future": 3},
        {"target_modules": None},
    ],
)
def test_a_field_that_changes_the_maths_is_refused_by_name(folder, shapes, fields):
    edit_config(folder, **fields)
    with pytest.raises(AdapterError, match=next(iter(fields))):
        read_peft(folder, shapes)


def test_a_targeted_module_without_weights(folder, shapes):
    edit_config(folder, target_modules=[*adapters_made.ALL, "lm_head"])
    with pytest.raises(AdapterError, match=r"targets 1 modules without weights, the first .*lm_head"):
        read_peft(folder, shapes)


def test_weights_of_a_module_that_is_not_targeted(folder, shapes):
    edit_config(folder, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"has weights, but adapter_config.json does not target it"):
        read_peft(folder, shapes)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.pop(KEY.format("B")), "q_proj: lora b is missing"),
        (lambda t: t.update({KEY.format("A"): torch.zeros(8, 63)}), r"lora a is \(8, 63\), expected \(8, 64\)"),
        (lambda t: t.update({KEY.format("A"): torch.zeros(4, 64)}), r"lora a is \(4, 64\), expected \(8, 64\)"),
        (lambda t: t.update({KEY.format("B"): torch.full((64, 8), torch.nan)}), "not finite"),
        (
            lambda t: t.update({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}),
            "layers.9.self_attn.q_proj is no linear of this model",
        ),
        (lambda t: t.update({"something.else": torch.zeros(1)}), "something.else is not a LoRA weight"),
        (lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.zeros(1)}), "save_embedding_layers"),
        (
            lambda t: t.update(
                {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(64)}
            ),
            "use_dora is false",
        ),
        (lambda t: t.clear(), "no weights"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder, shapes, edit, text):
    edit_tensors(folder, edit)
    with pytest.raises(AdapterError, match=text):
        read_peft(folder, shapes)


def test_files_that_are_missing_or_broken(folder, shapes, tmp_path):
    with pytest.raises(AdapterError, match=r"has no adapter_config.json"):
        read_peft(tmp_path / "nothing", shapes)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(AdapterError, match=r"cannot be read"):
        read_peft(folder, shapes)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"neither adapter_model.safetensors nor"):
        read_peft(folder, shapes)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match=r"cannot be read"):
        read_peft(folder, shapes)
