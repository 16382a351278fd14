"""What is refused of a PEFT directory, each by name; what is honoured is tested against PEFT in test_peft_parity."""

import json
import pickle

import adapters_made
import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file, save_file

from izh.adapters.peft import read_peft
from izh.adapters.sites import targets_of
from izh.errors import AdapterError
from izh.model.load import load_spec
from izh.model.source import resolve


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shapes(checkpoint):
    return targets_of(load_spec(resolve(str(checkpoint))))


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


def test_what_was_read_is_logged(folder, shapes, caplog):
    edit_config(folder, target_modules=["q_proj", "o_proj"])
    edit_tensors(folder, lambda t: [t.pop(key) for key in list(t) if "q_proj" not in key and "o_proj" not in key])
    with caplog.at_level("INFO", logger="izh.adapters"):
        read_peft(folder, shapes)
    assert "layers.*.self_attn.q_proj: rank 8, scale 2 (layers 0-1)" in caplog.text
    assert "layers.*.self_attn.o_proj: rank 8, scale 2 (layers 0-1)" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "IA3"},
        {"peft_type": None},
        {"bias": "some"},
        {"modules_to_save": ["score"]},
        {"modules_to_save": ["classifier", "lm_head"]},
        {"modules_to_save": ["norm"]},
        {"modules_to_save": "lm_head"},
        {"trainable_token_indices": []},
        {"trainable_token_indices": [1, 1]},
        {"trainable_token_indices": [-1]},
        {"trainable_token_indices": {"o_proj": [1]}},
        {"trainable_token_indices": {"lm_head": 3}},
        {"fan_in_fan_out": True},
        {"lora_bias": 1},
        {"lora_bias": True, "use_dora": True},
        {"lora_bias": True, "init_lora_weights": "gaussian"},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"target_parameters": ["x"]},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"kasa_config": {"beta": 1}},
        {"velora_config": {"scale": 1}},
        {"monteclora_config": {"num_samples": 1}},
        {"alora_invocation_tokens": [1]},
        {"alora_invocation_tokens": []},
        {"megatron_config": {"a": 1}},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "lora_ga"},
        {"loftq_config": {"bits": 4}},
        {"arrow_config": {"k": 1}},
        {"a_field_from_the_future": 3},
        {"a_field_from_the_future": 0},
        {"target_modules": None},
        {"target_modules": []},
        {"target_modules": [3]},
        {"target_modules": "(q_proj"},
        {"exclude_modules": 3},
        {"r": 0},
        {"r": "8"},
        {"r": True},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"use_rslora": "yes"},
        {"use_dora": 1},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"q_proj": 1.5}},
        {"rank_pattern": {"(q_proj": 4}},
        {"alpha_pattern": {"q_proj": None}},
        {"layers_to_transform": ["0"]},
        {"layers_to_transform": [0], "target_modules": ".*q_proj"},
        {"layers_pattern": ["layers"], "target_modules": "all-linear"},
        {"layers_pattern": ["layers"]},
        {"layers_pattern": ["(layers"], "layers_to_transform": [0]},
    ],
)
def test_a_field_that_changes_the_maths_or_makes_no_sense_is_refused_by_name(folder, shapes, fields):
    edit_config(folder, **fields)
    name, value = next(iter(fields.items()))
    with pytest.raises(AdapterError, match=rf"{folder}: adapter_config.json: {name}\b.*") as caught:
        read_peft(folder, shapes)
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    shown = [value, *inner]
    assert any(repr(each) in str(caught.value) for each in shown)


def test_a_conversion_is_advised_for_an_adapter_that_needs_changed_base_weights(folder, shapes):
    edit_config(folder, init_lora_weights="pissa")
    with pytest.raises(AdapterError, match="path_initial_model_for_weight_conversion"):
        read_peft(folder, shapes)


@pytest.mark.parametrize(
    "fields",
    [
        {"task_type": "CAUSAL_LM", "revision": "main", "inference_mode": False},
        {"modules_to_save": [], "target_parameters": [], "layer_replication": []},
        {"init_lora_weights": False, "corda_config": {"verbose": True}, "lora_ga_config": {"scale": "unit"}},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.5}},
        {"runtime_config": {"ephemeral_gpu_offload": True}, "qalora_group_size": 32, "megatron_core": "elsewhere"},
        {"a_field_from_the_future": None},
    ],
)
def test_a_field_that_does_not_change_the_maths_changes_nothing(folder, shapes, fields):
    digest = read_peft(folder, shapes).digest
    edit_config(folder, **fields)
    assert read_peft(folder, shapes).digest == digest


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
        (
            lambda t: t.update({KEY.format("A").replace("lora_A", "base_layer"): torch.ones(64, 64)}),
            "q_proj: copy of the base weight found; only lm_head and embed_tokens can be replaced",
        ),
        (
            lambda t: t.update({"base_model.model.score.weight": torch.ones(1, 64)}),
            "score is no linear of this model",
        ),
        (
            lambda t: t.update(
                {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(64)}
            ),
            r"q_proj: magnitude found, but use_dora is False",
        ),
        (
            lambda t: t.update({"base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": torch.ones(64)}),
            r"q_proj: bias found, but .* bias 'none'",
        ),
        (
            lambda t: t.update({"base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": torch.ones(64)}),
            r"q_proj: lora b's bias found, but .*lora_bias False",
        ),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.bias": torch.ones(64)}),
            r"embed_tokens has weights, but adapter_config.json does not target it",
        ),
        (lambda t: t.update({KEY.format("A.default"): torch.zeros(8, 64)}), r"q_proj\.lora_A.*weight is there twice"),
        (lambda t: t.update({KEY.format("B"): torch.ones(64, 8, dtype=torch.int8)}), r"int8, expected floating point"),
        (lambda t: t.update({KEY.format("B"): torch.full((64, 8), 3e38)}), r"scaled by 2, lora b holds .* not finite"),
        (
            lambda t: t.update({KEY.format("A").replace("lora_A.weight", "lora_embedding_A"): t.pop(KEY.format("A"))}),
            r"q_proj: lora a is missing",
        ),
        (lambda t: t.clear(), "no weights"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder, shapes, edit, text):
    edit_tensors(folder, edit)
    with pytest.raises(AdapterError, match=text):
        read_peft(folder, shapes)


def test_dora_without_magnitudes(folder, shapes):
    edit_config(folder, use_dora=True)
    with pytest.raises(AdapterError, match="_proj: magnitude is missing"):
        read_peft(folder, shapes)


def test_a_tied_head_without_weights(folder, shapes):
    """PEFT would give the head the embedding's weights; a file that has none for it is not what PEFT saved."""
    edit_config(folder, target_modules=[*adapters_made.ALL, "embed_tokens"], ensure_weight_tying=True)
    a, b = (f"base_model.model.model.embed_tokens.lora_embedding_{each}" for each in "AB")
    edit_tensors(folder, lambda t: t.update({a: torch.ones(8, shapes["embed_tokens"][0]), b: torch.ones(64, 8)}))
    with pytest.raises(AdapterError, match=r"targets 1 modules without weights, the first lm_head"):
        read_peft(folder, shapes)


@pytest.mark.parametrize(
    "content",
    [b"", b"no pickle", pickle.dumps({"a": print}, protocol=2), pickle.dumps([1], protocol=2)],
    ids=["empty", "no pickle", "a function", "a list"],
)
def test_a_pickled_file_that_is_broken_or_holds_more_than_tensors(folder, shapes, content):
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(content)
    with pytest.raises(AdapterError, match=r"adapter_model\.bin: (cannot be read|must hold tensors)"):
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
