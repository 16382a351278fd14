"""Phi-3: projections that are fused in the checkpoint too, so that an adapter has one A and B for all their parts."""

import adapters_made
import engines
import pytest
import tiny_checkpoint
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from izh.adapters.peft import read_peft
from izh.adapters.sites import decoder_sites, shapes_of, targets_of
from izh.config import EngineOptions
from izh.engine.build import build
from izh.errors import AdapterError
from izh.kernels.reference import REFERENCE
from izh.model.decoder import Decoder
from izh.model.load import load_spec
from izh.model.source import resolve

BOUND = 1e-4  # absolute, of log-probabilities, against PEFT in float64
PROMPT = list(range(3, 40))
FUSED = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]
CONFIGS = {
    "plain": {"target_modules": FUSED},
    "all_linear": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "dora": {"target_modules": FUSED, "use_dora": True},
    "lora_bias": {"target_modules": FUSED, "lora_bias": True},
    "patterns": {"target_modules": FUSED, "rank_pattern": {"qkv_proj": 3}, "alpha_pattern": {"gate_up_proj": 40}},
    "ends": {"target_modules": ["qkv_proj"], "modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9, 11]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = Phi3Config(
        vocab_size=335,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("phi3")
    torch.manual_seed(0)
    Phi3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def targets(checkpoint):
    return targets_of(load_spec(resolve(str(checkpoint))))


def test_the_targets_are_the_checkpoints_modules(checkpoint, targets):
    assert targets["layers.1.self_attn.qkv_proj"] == (64, 128)
    assert targets["layers.1.mlp.gate_up_proj"] == (64, 192)
    assert not any(path.endswith(("q_proj", "up_proj")) and "gate_up" not in path for path in targets)
    assert targets == shapes_of(decoder_sites(Decoder(load_spec(resolve(str(checkpoint))), REFERENCE, "meta")))


@pytest.mark.parametrize("kernels", ["numba", "reference"])
def test_every_adapter_in_one_batch_is_what_peft_computes(checkpoint, tmp_path, kernels):
    models = {
        name: adapters_made.make(checkpoint, tmp_path / name, seed, **config).double()
        for seed, (name, config) in enumerate(CONFIGS.items(), 1)
    }
    lora = tuple(f"{name}={tmp_path / name}" for name in CONFIGS)
    options = EngineOptions(model=str(checkpoint), kv_cache_gb=0.02, lora=lora, kernels=kernels)
    outputs = engines.run(
        build(options, resolve(str(checkpoint)), quiet=True).core,
        engines.request("base", PROMPT),
        *(adapted(name) for name in CONFIGS),
    )
    assert len({tuple(output.token_ids) for output in outputs.values()}) == len(CONFIGS) + 1
    for name, model in models.items():
        answer = outputs[name]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        assert answer.token_ids == logprobs.argmax(-1).tolist()
        for position, token in enumerate(answer.token_ids):
            expected = logprobs[position, token].item()
            assert answer.logprobs[position].logprob == pytest.approx(expected, abs=BOUND)


def adapted(name):
    made = engines.request(name, PROMPT, logprobs=0, max_tokens=8)
    return type(made)(**{f: getattr(made, f) for f in made.__struct_fields__} | {"adapters": ((name, 1.0),)})


def test_an_adapter_of_a_model_with_other_projections_is_refused(checkpoint, targets, tmp_path):
    llama = tiny_checkpoint.save_llama(tmp_path / "llama")
    adapters_made.make(llama, tmp_path / "split", 1, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"self_attn\.q_proj is no linear of this model"):
        read_peft(tmp_path / "split", targets)
    adapters_made.make(checkpoint, tmp_path / "fused", 1, target_modules=["qkv_proj"])
    with pytest.raises(AdapterError, match=r"self_attn\.qkv_proj is no linear of this model"):
        read_peft(tmp_path / "fused", targets_of(load_spec(resolve(str(llama)))))
