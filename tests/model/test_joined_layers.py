"""Layers computed in one call give what modules give one after another, to the last bit, and only where they may."""

import harness
import pytest
import tiny
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config, SmolLM3Config

from izh.batch import BothWays, Overrides
from izh.kernels.cpu.decoder import SLICE
from izh.kernels.cpu.row_limits import RowLimits
from izh.kernels.cpu.table import NUMBA, with_rows
from izh.kernels.decoder import Corrections
from izh.kernels.lora import AdapterRows
from izh.kernels.reference import REFERENCE
from izh.model.decoder import Decoder
from izh.model.load import load_decoder, load_spec
from izh.model.source import resolve

SIZES = tiny.SIZES
FEW = 24  # rows
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 5.0, 9.0]}
CONFIGS = {
    "norms over heads, biases": Qwen3Config(**SIZES, head_dim=10, attention_bias=True),
    "layers without rotation, windows": SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=8
    ),
    "part of a head turns": Phi3Config(
        **SIZES,
        original_max_position_embeddings=32,
        partial_rotary_factor=0.5,
        rope_parameters={**LONGROPE, "rope_theta": 1000.0},
    ),
    "norms after, two recipes, gelu": Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=8, sliding_window_pattern=3, query_pre_attn_scalar=20
    ),
    "int8": Qwen2Config(**SIZES),
    "int4": LlamaConfig(**SIZES, mlp_bias=True),
}


def load(directory, ops, quantization=None) -> Decoder:
    source = resolve(str(directory))
    return load_decoder(source, load_spec(source), ops, "cpu", torch.float32, quiet=True, quantization=quantization)[0]


def steps(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of a prompt in pieces, of one beside a chunk of another, and of both's next tokens."""
    paged = harness.PagedDecoder(decoder)
    first, second = paged.add(tiny.prompt(41, seed=1), num_prompt=40), paged.add(tiny.prompt(9, seed=2), num_prompt=8)
    plans = [[(first, 0, 20)], [(first, 20, 21), (second, 0, 8)], [(first, 21, 40)], [(second, 8, 9), (first, 40, 41)]]
    return [torch.cat(paged.logits(plan)) for plan in plans]


def refuse(*args):
    raise AssertionError("a step of few rows went through the modules")


@pytest.mark.parametrize("name", CONFIGS)
def test_one_call_gives_what_the_modules_give(name, tmp_path, monkeypatch):
    tiny.reference_model(CONFIGS[name]).save_pretrained(tmp_path)
    decoder = load(tmp_path, with_rows(RowLimits(FEW, FEW)), name if name.startswith("int") else None)
    expected = steps(decoder)
    decoder.join()
    monkeypatch.setattr(decoder, "_one_by_one", refuse)
    for ours, theirs in zip(steps(decoder), expected, strict=True):
        assert theirs.std() > 0.1
        assert torch.equal(ours, theirs)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_of_few_bits_any_number_of_rows_is_one_call(form, tmp_path, monkeypatch):
    """They go a slice at a time; heads are normed, so that queries move, and the last slice is a short one."""
    config = Qwen3Config(**SIZES | {"max_position_embeddings": 2048, "intermediate_size": 48}, head_dim=10)
    tiny.reference_model(config).save_pretrained(tmp_path)
    decoder = load(tmp_path, NUMBA, form)
    paged = harness.PagedDecoder(decoder, num_blocks=600)
    first, second = (paged.add(tiny.prompt(num, seed=num)) for num in (SLICE + 40, SLICE + 7))
    plan = [(first, 0, SLICE + 40), (second, 0, SLICE + 7)]
    expected = torch.cat(paged.logits(plan))
    decoder.join()
    monkeypatch.setattr(decoder, "_one_by_one", refuse)
    again = harness.PagedDecoder(decoder, num_blocks=600)
    first, second = (again.add(tiny.prompt(num, seed=num)) for num in (SLICE + 40, SLICE + 7))
    assert torch.equal(torch.cat(again.logits(plan)), expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny.reference_model(LlamaConfig(**SIZES)).save_pretrained(directory)
    return directory


@torch.inference_mode()
def test_steps_that_need_more_go_through_the_modules(llama, monkeypatch):
    decoder = load(llama, with_rows(RowLimits(FEW, FEW)))
    decoder.join()
    seen = []
    plain = decoder._one_by_one
    monkeypatch.setattr(decoder, "_one_by_one", lambda *args: seen.append(len(args[0])) or plain(*args))
    paged = harness.PagedDecoder(decoder)
    row = paged.add(tiny.prompt(FEW + 1))
    decoder(paged.batch([(row, 0, FEW)]), paged.pages)
    image = torch.randn(1, decoder.spec.hidden_size)
    batch = paged.batch([(row, 0, 2)])
    batch.overrides = Overrides(torch.tensor([1]), image)
    decoder(batch, paged.pages)
    assert seen == []

    decoder(paged.batch([(row, 0, FEW + 1)]), paged.pages)
    batch.overrides = Overrides(torch.tensor([1]), torch.cat([image, image], 1))
    decoder(batch, paged.pages)
    rows = AdapterRows.of([0, -1, 0])
    monkeypatch.setattr(decoder, "corrections", lambda: Corrections(rows, None))
    decoder(paged.batch([(row, 0, 3)]), paged.pages)
    monkeypatch.setattr(decoder, "corrections", lambda: None)
    batch = paged.batch([(row, 0, 4)])
    batch.both_ways = (BothWays(1, 3, 0, 3),)
    decoder(batch, paged.pages)
    assert seen == [FEW + 1, 2, 3, 4]


@torch.inference_mode()
def test_tables_without_it_and_other_dtypes_stay_with_the_modules(llama):
    for decoder in (load(llama, REFERENCE), load(llama, NUMBA).to(torch.float64)):
        decoder.join()
        assert decoder._joined is None
