"""The real model against `transformers`, the oracle."""

import engines
import pytest
import torch
from prompts import PROMPTS

NEAR_TIE = 1e-4  # two logits this close may swap order; then the logits themselves are compared
LOGIT_BOUND = 1e-3  # max abs difference over the whole vocabulary, float32, logits of magnitude ~20


@pytest.fixture(scope="module")
def oracle(demo_source):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_source.path, dtype=torch.float32).eval()


def test_greedy_answers_equal_transformers_for_64_tokens(demo, demo_tokenizer, oracle):
    """By induction over positions: given the same tokens so far, the oracle's best token is ours."""
    prompts = [demo_tokenizer.encode(text) for text in PROMPTS]
    requests = [engines.request(str(i), p, max_tokens=64, logprobs=0) for i, p in enumerate(prompts)]
    outputs = engines.run(demo.engine(), *requests)
    ties = []
    for i, prompt in enumerate(prompts):
        answer = outputs[str(i)].token_ids
        assert len(answer) == 64
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1)
        logprobs = logits.double().log_softmax(-1)
        for position, token in enumerate(answer):
            assert outputs[str(i)].logprobs[position].logprob == pytest.approx(
                logprobs[position, token].item(), abs=1e-3
            )
            if token != best.indices[position]:
                gap = (best.values[position] - logits[position, token]).item()
                assert gap < NEAR_TIE, f"prompt {i}, token {position}: {token} is {gap} below the oracle's best"
                ties.append((i, position, gap))
    assert len(ties) <= 2, f"more near-ties than chance: {ties}"
