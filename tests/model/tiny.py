"""Tiny random checkpoints made with transformers, and the reference logits to compare with."""

from pathlib import Path
from typing import Any

import torch
from harness import PagedDecoder
from torch import Tensor
from transformers import AutoModelForCausalLM

from izh.kernels.reference import REFERENCE
from izh.model.decoder import Decoder
from izh.model.load import load_decoder, load_spec
from izh.model.source import ModelSource, resolve

CPU = torch.device("cpu")
OPS = REFERENCE
VOCAB = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def reference_model(config: Any, cls: Any = AutoModelForCausalLM) -> Any:
    """A float32 eager model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(1)
    make = cls.from_config if cls is AutoModelForCausalLM else cls._from_config
    model = make(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.12)
    return model


def load(directory: Path) -> Decoder:
    return load_source(resolve(str(directory)))


def load_source(source: ModelSource) -> Decoder:
    return load_decoder(source, load_spec(source), OPS, CPU, torch.float32, quiet=True)[0]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[len, vocab] of one whole-prompt forward."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


def max_difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.1, "the reference logits are nearly constant, so agreement would mean nothing"
    return (ours - theirs).abs().max().item()


def check(model: Any, decoder: Decoder, *lengths: int) -> None:
    """Our logits equal the reference's, for whole prompts of these lengths."""
    for length in lengths:
        token_ids = prompt(length, seed=length)
        ours = PagedDecoder(decoder).prompt_logits(token_ids)
        assert max_difference(ours, reference_logits(model, token_ids)) < 1e-4


@torch.inference_mode()
def stepwise_logits(model: Any, token_ids: list[int], num_prompt: int) -> Tensor:
    """[len, vocab]: the prompt at once, then one token at a time on the reference's own cache."""
    out = model(input_ids=torch.tensor([token_ids[:num_prompt]]), use_cache=True)
    logits, cache = [out.logits[0]], out.past_key_values
    for position in range(num_prompt, len(token_ids)):
        out = model(
            input_ids=torch.tensor([token_ids[position : position + 1]]),
            position_ids=torch.tensor([[position]]),
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(out.logits[0])
        cache = out.past_key_values
    return torch.cat(logits)
