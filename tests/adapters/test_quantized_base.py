"""Adapters on a base in few bits: each is what PEFT computes on the rounded weights, whoever is in the batch."""

import adapters_made
import engines
import few_bits
import pytest
import tiny_checkpoint
import torch
from transformers import AutoModelForCausalLM

from izh.config import EngineOptions
from izh.engine.build import build
from izh.kernels.quantized import FORMS
from izh.model.source import resolve
from izh.request import Request

BOUND = 2e-2  # absolute, of log-probabilities, against PEFT in float64: see few_bits.py
CONFIGS = {
    "plain": {},
    "dora": {"use_dora": True},
    "dora_ends": {"use_dora": True, "target_modules": ["v_proj", "lm_head", "embed_tokens"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["k_proj", "up_proj"]},
    "tokens": {"trainable_token_indices": [7, 3, 300, 9, 41]},
    "head_and_copies": {"modules_to_save": ["lm_head"], "save_embedding_layers": True},
}
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module", params=["int8", "int4"])
def world(tmp_path_factory, request):
    """(engine, {name: PEFT's model in float64 on the rounded weights}); "base" is the model alone."""
    root = tmp_path_factory.mktemp("adapters")
    checkpoint = tiny_checkpoint.save_llama(root / "model", initializer_range=0.2)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if parameter.dim() == 2:
                form = FORMS["int8" if "embed_tokens" in name or "lm_head" in name else request.param]
                parameter.copy_(form.dequantize(*form.quantize(parameter)))
    base.save_pretrained(checkpoint)
    models = {"base": base.eval()}
    for seed, (name, config) in enumerate(CONFIGS.items(), 1):
        models[name] = adapters_made.make(checkpoint, root / name, seed, **config)
    lora = tuple(f"{name}={root / name}" for name in CONFIGS)
    options = EngineOptions(model=str(checkpoint), lora=lora, kv_cache_gb=0.02, quantization=request.param)
    for model in models.values():
        few_bits.round_activations(model)
    return build(options, resolve(str(checkpoint)), quiet=True), {
        name: model.double() for name, model in models.items()
    }


def request(name, label=""):
    made = engines.request(f"{name}{label}", PROMPT, logprobs=0, max_tokens=8)
    adapters = () if name == "base" else ((name, 1.0),)
    return Request(**{f: getattr(made, f) for f in made.__struct_fields__} | {"adapters": adapters})


def test_each_is_pefts_and_the_same_alone(world):
    engine, models = world
    mixed = engines.run(engine.core, *(request(name) for name in models))
    for name, model in models.items():
        output = mixed[name]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        for position, token in enumerate(output.token_ids):
            assert output.logprobs[position].logprob == pytest.approx(logprobs[position, token].item(), abs=BOUND)
        alone = engines.run(engine.core, request(name, " alone"))[f"{name} alone"]
        assert alone.token_ids == output.token_ids
    assert len({tuple(output.token_ids) for output in mixed.values()}) > len(models) // 2


def test_a_copy_of_the_embedding_replaces_nothing(world):
    engine, _ = world
    assert engine.adapters is not None
    adapter = engine.adapters.find(_Sequence(request("head_and_copies"))).weights.result(10)
    assert {path for path, delta in adapter.deltas.items() if delta.replaced is not None} == {"lm_head"}


class _Sequence:
    def __init__(self, asked):
        self.request = asked
