"""GGUF files written with the gguf package, against the HF checkpoint they were made from."""

import gguf
import pytest
import tiny
import torch
from gguf_files import write
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from izh.errors import ModelLoadError
from izh.model.load import load_decoder, load_spec
from izh.model.source import resolve

SIZES = {**tiny.SIZES, "num_hidden_layers": 2}
QUANTIZABLE = {**SIZES, "hidden_size": 64, "intermediate_size": 96}  # rows are whole blocks of 32

CASES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


def load(path):
    return tiny.load_source(resolve(str(path)))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_original_checkpoint(name, tmp_path):
    config = CASES[name]
    model = tiny.reference_model(config)
    path = write(tmp_path / "tiny.gguf", config, model.state_dict())
    decoder = load(path)
    assert decoder.spec.eos_token_ids == (2,)
    tiny.check(model, decoder, 30)


def test_llama_biases_are_permuted_with_their_rows(tmp_path):
    config = LlamaConfig(**SIZES, attention_bias=True)
    state = tiny.reference_model(config).state_dict()
    for layer in range(2):  # a llama.cpp file has no output bias unless it is a real one
        state[f"model.layers.{layer}.self_attn.o_proj.bias"].zero_()
    model = tiny.reference_model(config)
    model.load_state_dict(state)
    tiny.check(model, load(write(tmp_path / "tiny.gguf", config, state)), 20)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantized_tensors_are_the_packages_dequantized_values(kind, tmp_path):
    config = LlamaConfig(**QUANTIZABLE)
    model = tiny.reference_model(config)
    quantization = gguf.GGMLQuantizationType[kind]
    path = write(tmp_path / "tiny.gguf", config, model.state_dict(), quantization)
    rounded = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), quantization), quantization))
        for name, tensor in model.state_dict().items()
        if tensor.dim() == 2
    }
    decoder = load(path)
    assert torch.equal(decoder.layers[1].mlp.down_proj.weight, rounded["model.layers.1.mlp.down_proj.weight"])
    # Rotary pairs are quantized along their rows, so undoing the pairing gives the same values.
    attention = torch.cat([rounded[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(decoder.layers[0].attention.qkv_proj.weight, attention)


def test_yarn_metadata_is_read(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    config = Qwen2Config(**SIZES, rope_parameters=rope)
    model = tiny.reference_model(config)
    tiny.check(model, load(write(tmp_path / "tiny.gguf", config, model.state_dict())), 20, 70)


def test_llama3_scaling_comes_as_a_tensor_of_divisors(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    model = tiny.reference_model(config)
    plain = 1.0 / 500.0 ** (torch.arange(0, 12, 2).float() / 12)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 7.9
    path = write(tmp_path / "tiny.gguf", config, model.state_dict(), **{"rope_freqs.weight": divisors})
    decoder = load(path)
    tiny.check(model, decoder, 20, 90)
    assert decoder.spec.length_key(1000) == b""


def test_fingerprint_is_that_of_the_file(tmp_path):
    config = CASES["llama"]
    state = tiny.reference_model(config).state_dict()
    prints = set()
    for name in ("one.gguf", "two.gguf"):
        source = resolve(str(write(tmp_path / name, config, state)))
        spec = load_spec(source)
        prints |= {load_decoder(source, spec, tiny.OPS, tiny.CPU, torch.float32, quiet=True)[1] for _ in range(2)}
    assert len(prints) == 2


def test_files_that_cannot_be_read_say_why(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not gguf at all, but long enough")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf: not a readable GGUF file"):
        load_spec(resolve(str(broken)))

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_context_length(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'mamba' is not supported; supported: llama"):
        load_spec(resolve(str(tmp_path / "other.gguf")))


def test_quantization_without_a_decoder_is_refused_by_name(tmp_path, monkeypatch):
    config = LlamaConfig(**QUANTIZABLE)
    state = tiny.reference_model(config).state_dict()
    path = write(tmp_path / "tiny.gguf", config, state, gguf.GGMLQuantizationType.Q4_0)
    monkeypatch.delitem(gguf.quants._type_traits, gguf.GGMLQuantizationType.Q4_0)
    with pytest.raises(ModelLoadError, match=r"weight' has quantization type Q4_0"):
        load(path)
