"""Adapters on the real model against PEFT in float64: one mixed batch = each alone = PEFT = PEFT's merged weights."""

import adapters_made
import engines
import pytest
import torch
from peft import PeftModel
from prompts import PROMPTS
from transformers import AutoModelForCausalLM

from izh.config import EngineOptions
from izh.engine.build import build

BOUND = 1e-4  # absolute, of log-probabilities
NUM_TOKENS = 24
CONFIGS = {
    "plain": {"lora_alpha": 16},
    "rslora": {"use_rslora": True, "lora_alpha": 16},
    "dora": {"use_dora": True, "r": 8},
}
CHOSEN = (0, 3, 9)  # of PROMPTS: a sentence, a question, Japanese


@pytest.fixture(scope="module")
def folders(demo_source, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, config) in enumerate(CONFIGS.items(), 1):
        adapters_made.make(demo_source.path, root / name, seed, **({"r": 16, "std": 0.03} | config))
    return {name: root / name for name in CONFIGS}


@pytest.fixture(scope="module")
def core(demo_source, folders, kernels):
    lora = tuple(f"{name}={folder}" for name, folder in folders.items())
    options = EngineOptions(model="demo", kv_cache_gb=0.2, lora=lora, prefix_caching=False, **kernels)
    return build(options, demo_source, quiet=True).core


@pytest.fixture(scope="module")
def prompts(demo_tokenizer):
    return [demo_tokenizer.encode(PROMPTS[index]) for index in CHOSEN]


@pytest.fixture(scope="module")
def mixed(core, prompts):
    """{adapter, or "base": the answer to each prompt}, all of them from one batch."""
    names = ("base", *CONFIGS)
    outputs = engines.run(core, *(ask(name, i, prompt) for name in names for i, prompt in enumerate(prompts)))
    return {name: [outputs[f"{name}.{i}"] for i in range(len(prompts))] for name in names}


def ask(name, number, prompt):
    made = engines.request(f"{name}.{number}", prompt, logprobs=0, max_tokens=NUM_TOKENS)
    adapters = () if name == "base" else ((name, 1.0),)
    return type(made)(**{f: getattr(made, f) for f in made.__struct_fields__} | {"adapters": adapters})


@torch.inference_mode()
def distances(model, outputs, prompts):
    """How far each token's log-probability is from the model's, and how far the token is below the model's best."""
    off, below = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = model(input_ids=torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        for position, token in enumerate(output.token_ids):
            off.append(abs(output.logprobs[position].logprob - logprobs[position, token].item()))
            below.append((logprobs[position].max() - logprobs[position, token]).item())
    return max(off), max(below)


def test_base_rows_of_a_mixed_batch_are_the_base_models(demo_source, mixed, prompts):
    model = AutoModelForCausalLM.from_pretrained(demo_source.path, dtype=torch.float32)
    assert_is(model.double().eval(), mixed["base"], prompts)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixed_batch_answers_as_peft_does_and_as_merged_weights_do(demo_source, folders, mixed, prompts, name):
    base = AutoModelForCausalLM.from_pretrained(demo_source.path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folders[name]).double().eval()
    assert_is(model, mixed[name], prompts)
    assert all(mine.token_ids != bases.token_ids for mine, bases in zip(mixed[name], mixed["base"], strict=True))
    merged = model.merge_and_unload()
    assert not any("lora" in path for path, _module in merged.named_modules())
    assert_is(merged, mixed[name], prompts)


def assert_is(model, outputs, prompts):
    """Greedy by the model's own logits, token after token, with its log-probabilities."""
    off, below = distances(model, outputs, prompts)
    assert off < BOUND
    assert below < BOUND, "not the model's best token, and no near-tie"


@pytest.mark.parametrize("name", ["base", *CONFIGS])
def test_alone_as_in_the_mixed_batch(core, mixed, prompts, name):
    number = 1
    output = engines.run(core, ask(name, number, prompts[number]))[f"{name}.{number}"]
    together = mixed[name][number]
    assert output.token_ids == together.token_ids
    assert len(output.token_ids) == NUM_TOKENS
    for mine, theirs in zip(output.logprobs, together.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=BOUND)
