"""What is chosen for the user, and which choices of the user are refused."""

import pytest
import tiny_checkpoint
import torch

from izh.config import QUANTIZATIONS, EngineOptions
from izh.engine.settings import held_bytes, resolve
from izh.errors import OptionError
from izh.kernels.select import select
from izh.model.load import load_decoder, load_spec
from izh.model.quantize import LowBitEmbedding, LowBitLinear
from izh.model.source import resolve as find


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return load_spec(find(str(tiny_checkpoint.save_llama(tmp_path_factory.mktemp("settings")))))


def test_weights_are_packed_where_it_helps_and_fits(spec, monkeypatch):
    assert resolve(EngineOptions(device="cpu"), spec).packs_weights
    assert not resolve(EngineOptions(device="cpu", pack_weights=False), spec).packs_weights
    assert not resolve(EngineOptions(device="cpu", kernels="reference"), spec).packs_weights
    assert not resolve(EngineOptions(device="cpu", dtype="bf16"), spec).packs_weights
    monkeypatch.setattr("izh.engine.settings._PACKED_SHARE", 1e-9)
    assert not resolve(EngineOptions(device="cpu", kv_cache_gb=0.01), spec).packs_weights
    assert resolve(EngineOptions(device="cpu", kv_cache_gb=0.01, pack_weights=True), spec).packs_weights


@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS])
def test_weights_take_the_memory_that_is_set_apart_for_them(quantization, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 640, "tie_word_embeddings": False}
    source = find(str(tiny_checkpoint.save_llama(tmp_path, **sizes)))
    ops = select(torch.device("cpu"), "numba")
    spec = load_spec(source)
    decoder, _ = load_decoder(source, spec, ops, "cpu", torch.float32, quiet=True, quantization=quantization)
    quantized = [each.quantized for each in decoder.modules() if isinstance(each, LowBitLinear | LowBitEmbedding)]
    taken = sum(each.num_bytes for each in quantized) + sum(each.nbytes for each in decoder.parameters())
    assert taken == pytest.approx(held_bytes(spec, torch.float32, quantization), rel=0.03)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pack_weights": True, "kernels": "reference"}, "--pack-weights is for"),
        ({"pack_weights": True, "quantization": "int8"}, "--pack-weights is for"),
        ({"quantization": "int3"}, "--quantization 'int3' is not known; int8 and int4 are"),
        ({"kernel_rows": -1}, "--kernel-rows -1: it is a number from 0 on"),
        ({"kernel_rows": 8, "deterministic": True}, "--kernel-rows 8: .*without --quantization and --deterministic"),
        ({"kernel_rows": 8, "quantization": "int8"}, "--kernel-rows 8: .*without --quantization"),
        ({"quantization": "int8", "dtype": "bf16"}, "--quantization int8 is for --device cpu, --dtype fp32"),
        ({"quantization": "int4", "dtype": "bf16"}, "--quantization int4 is for --device cpu, --dtype fp32"),
        ({"allow_runtime_lora": True}, "--allow-runtime-lora needs --lora-root"),
        ({"lora_host_gb": 0.0}, "--lora-host-gb must be above 0, got 0"),
        ({"max_loras": 0}, "--max-loras must be at least 1, got 0"),
        ({"max_lora_rank": 0}, "--max-lora-rank must be at least 1, got 0"),
        ({"kv_cache_gb": -1.0}, "--kv-cache-gb must be above 0, got -1"),
        ({"max_model_len": 10**6}, "--max-model-len 1000000 exceeds"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused_by_name(spec, options, text):
    with pytest.raises(OptionError, match=text):
        resolve(EngineOptions(device="cpu", **options), spec)
