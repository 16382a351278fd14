"""Loading: shards, dtypes, tied heads, and every way in which a checkpoint can be wrong."""

import json
import os

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from izh.errors import ModelLoadError
from izh.model.load import load_decoder, load_spec
from izh.model.source import resolve

SIZES = {**tiny.SIZES, "num_hidden_layers": 2}


@pytest.fixture
def checkpoint(tmp_path):
    tiny.reference_model(LlamaConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def configure(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(directory, *words):
    with pytest.raises(ModelLoadError) as caught:
        tiny.load(directory)
    for word in words:
        assert word in str(caught.value)


def test_missing_tensor_is_named(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(checkpoint, "1 tensors are missing", "layers.1.self_attn.k_proj.weight")


def test_tensor_without_a_place_is_named(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 48)}))
    refused(checkpoint, "score.weight", "no place")


def test_unexpected_bias_is_named(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(80)}))
    refused(checkpoint, "layers.0.mlp.up_proj.bias", "no place")


def test_wrong_shape_is_named_with_both_shapes(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(81, 48)}))
    refused(checkpoint, "layers.0.mlp.up_proj.weight", "[81, 48]", "[80, 48]")


def test_frequency_buffers_of_old_checkpoints_are_passed_over(checkpoint):
    before = tiny.load(checkpoint).layers[0].mlp.down_proj.weight
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(6)}))
    assert torch.equal(tiny.load(checkpoint).layers[0].mlp.down_proj.weight, before)


def test_names_without_the_model_prefix_are_accepted(checkpoint):
    before = tiny.load(checkpoint).layers[1].attention.qkv_proj.weight

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(checkpoint, strip)
    assert torch.equal(tiny.load(checkpoint).layers[1].attention.qkv_proj.weight, before)


def test_fused_rows_are_the_separate_ones_in_order(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    layer = tiny.load(checkpoint).layers[1]
    attention = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(layer.attention.qkv_proj.weight, torch.cat(attention))
    mlp = [tensors[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(mlp))


def test_tied_checkpoint_may_repeat_the_embeddings_but_not_differ_from_them(checkpoint):
    configure(checkpoint, tie_word_embeddings=True)
    refused(checkpoint, "lm_head.weight", "tie_word_embeddings")
    rewrite(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    decoder = tiny.load(checkpoint)
    assert decoder.lm_head.weight is decoder.embed_tokens.weight


def test_shards_load_like_one_file(checkpoint, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    LlamaForCausalLM.from_pretrained(checkpoint).save_pretrained(sharded, max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = tiny.load(checkpoint).state_dict(), tiny.load(sharded).state_dict()
    assert all(torch.equal(one[name], many[name]) for name in one)
    next(sharded.glob("*-00002-*.safetensors")).unlink()
    refused(sharded, "00002", "download the checkpoint again")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_converted(checkpoint, dtype):
    exact = tiny.load(checkpoint)
    source = resolve(str(checkpoint))
    decoder, _ = load_decoder(source, load_spec(source), tiny.OPS, tiny.CPU, dtype, quiet=True)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).to(dtype))


def test_fingerprint_follows_weights_and_config(checkpoint):
    def fingerprint():
        source = resolve(str(checkpoint))
        spec = load_spec(source)
        return load_decoder(source, spec, tiny.OPS, tiny.CPU, torch.float32, quiet=True)[1]

    first = fingerprint()
    assert fingerprint() == first
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    second = fingerprint()
    configure(checkpoint, rms_norm_eps=1e-4)
    assert len({first, second, fingerprint()}) == 3


def test_progress_goes_to_stderr_and_can_be_silenced(checkpoint, capfd):
    source = resolve(str(checkpoint))
    for quiet in (True, False):
        load_decoder(source, load_spec(source), tiny.OPS, tiny.CPU, torch.float32, quiet=quiet)
        out, err = capfd.readouterr()
        assert out == ""
        assert ("loading" in err) is not quiet


def test_files_that_are_not_safetensors_are_refused(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"\x00" * 100)
    refused(checkpoint, "not a readable safetensors file")
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, "no model.safetensors", "save_pretrained")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba'", "llama", "gemma3_text"]),
        ({"hidden_act": "relu"}, ["'relu'", "silu"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ["rope_type", "'spiral'", "yarn"]),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}}, ["mrope_section", "[2, 2, 2]"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": None}}, ["factor", "linear"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"hidden_size": "wide"}, ["config.json", "hidden_size"]),
    ],
)
def test_configs_that_ask_for_what_is_not_computed_are_refused(checkpoint, fields, words):
    configure(checkpoint, **fields)
    refused(checkpoint, *words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["'chunked_attention'"]),
    ],
)
def test_gemma3_fields_that_change_attention_are_refused(checkpoint, fields, words):
    raw = {name: value for name, value in SIZES.items() if not name.endswith("_id")}
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "gemma3_text", **raw, **fields}))
    refused(checkpoint, *words)


def test_config_that_is_no_config_is_refused(checkpoint):
    (checkpoint / "config.json").write_text("[]")
    refused(checkpoint, "has no model_type")
    (checkpoint / "config.json").write_text("{")
    refused(checkpoint, "config.json", "cannot be read")
