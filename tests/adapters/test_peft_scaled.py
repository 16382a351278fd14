"""Gemma 3: the embedding's rows are scaled on their way in, and what adapters do to them is scaled with them."""

import adapters_made
import engines
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from izh.config import EngineOptions
from izh.engine.build import build
from izh.model.source import resolve

BOUND = 1e-4  # absolute, of log-probabilities, against PEFT in float64
PROMPT = list(range(3, 40))
CONFIGS = {
    "lora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "dora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "tokens": {"trainable_token_indices": [7, 3, 9, 300]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = Gemma3TextConfig(
        vocab_size=335,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=16,
        query_pre_attn_scalar=20,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_computes_what_peft_loads(checkpoint, tmp_path, name):
    adapters_made.make(checkpoint, tmp_path, 1, **CONFIGS[name])
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path).double().eval()
    options = EngineOptions(model=str(checkpoint), kv_cache_gb=0.02, lora=(f"it={tmp_path}",))
    made = engines.request("it", PROMPT, logprobs=0, max_tokens=6)
    fields = {f: getattr(made, f) for f in made.__struct_fields__}
    core = build(options, resolve(str(checkpoint)), quiet=True).core
    output = engines.run(core, type(made)(**fields | {"adapters": (("it", 1.0),)}))["it"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    assert output.token_ids == logprobs.argmax(-1).tolist()
    for position, token in enumerate(output.token_ids):
        assert output.logprobs[position].logprob == pytest.approx(logprobs[position, token].item(), abs=BOUND)
