"""A decoder in few bits: what it computes, what it keeps, and that it is read from any checkpoint."""

import few_bits
import harness
import pytest
import tiny
import tiny_checkpoint
import torch
from transformers import LlamaConfig, Qwen2Config

from izh.kernels.quantized import FORMS
from izh.kernels.select import select
from izh.model.decoder import Embedding
from izh.model.layers import Linear
from izh.model.load import load_decoder, load_spec
from izh.model.quantize import LowBitEmbedding, LowBitLinear, dequantized
from izh.model.source import resolve

PROMPT = tiny.prompt(40)
BOUND = 2e-2  # absolute, of logits: see few_bits.py


def load(path, quantization="int8", kernels="numba"):
    source, ops = resolve(str(path)), select(torch.device("cpu"), kernels)
    return load_decoder(source, load_spec(source), ops, "cpu", torch.float32, quiet=True, quantization=quantization)


def rounded(weight, form):
    return FORMS[form].dequantize(*FORMS[form].quantize(weight))


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**tiny.SIZES, tie_word_embeddings=True), Qwen2Config(**tiny.SIZES, tie_word_embeddings=False)],
    ids=["tied", "untied, with biases"],
)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_model_of_the_rounded_weights_in_any_company(config, quantization, tmp_path):
    model = tiny.reference_model(config)
    model.save_pretrained(tmp_path)
    decoder, fingerprint = load(tmp_path, quantization)
    assert not any(isinstance(module, Linear | Embedding) for module in decoder.modules())
    plain, whole = load(tmp_path, None)
    assert fingerprint == quantization.encode() + b":" + whole
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(rounded(parameter, "int8" if "embed" in name or "head" in name else quantization))
        unrounded = model(input_ids=torch.tensor([PROMPT])).logits[0]
        few_bits.round_activations(model)
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    logits = harness.PagedDecoder(decoder).prompt_logits(PROMPT)
    assert (logits - expected).abs().max() < BOUND
    assert (unrounded - expected).abs().max() > 2 * BOUND, "the bound tells apart what it should"
    assert (logits - harness.PagedDecoder(plain).prompt_logits(PROMPT)).abs().max() > 2 * BOUND
    for chunk in (1, 7):
        assert torch.equal(harness.PagedDecoder(decoder).prompt_logits(PROMPT, chunk), logits)
    defined = harness.PagedDecoder(load(tmp_path, quantization, "reference")[0]).prompt_logits(PROMPT)
    assert (defined - logits).abs().max() < BOUND


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_shared_table_is_kept_once_in_8_bits_and_looked_up_in_rows(quantization, tmp_path):
    path = tiny_checkpoint.save_llama(tmp_path)
    decoder, plain = load(path, quantization)[0], load(path, None)[0]
    embedding, head = decoder.embed_tokens, decoder.lm_head
    assert isinstance(embedding, LowBitEmbedding)
    assert isinstance(head, LowBitLinear)
    assert embedding.quantized is head.quantized
    assert {name for name, _ in decoder.named_parameters()} == {
        name for name, _ in plain.named_parameters() if "norm" in name
    }
    ids = torch.tensor([5, 0, 300, 5])
    table = rounded(plain.embed_tokens.weight, "int8")
    assert torch.equal(embedding(ids), table[ids])
    assert torch.equal(dequantized(head, 3, 9), table[3:9])
