"""In few bits a row's numbers are exact, so equalities hold to the last bit, on the real model."""

import engines
import pytest
from prompts import PROMPTS


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantized(demo_source, request):
    return engines.load(demo_source, quantization=request.param)


@pytest.fixture(scope="module")
def prompts(demo_tokenizer):
    return [demo_tokenizer.encode(text) for text in PROMPTS[:6]]


def ask(engine, prompt, name="it"):
    return engines.run(engine, engines.request(name, prompt, logprobs=0, max_tokens=8))[name]


@pytest.fixture(scope="module")
def alone(quantized, prompts):
    return [ask(quantized.engine(), prompt) for prompt in prompts]


def assert_same(output, expected):
    assert output.token_ids == expected.token_ids
    assert output.logprobs == expected.logprobs


def test_in_a_batch_as_alone(quantized, prompts, alone):
    requests = [engines.request(str(i), prompt, logprobs=0, max_tokens=8) for i, prompt in enumerate(prompts)]
    for options in ({}, {"max_num_seqs": 5, "max_num_batched_tokens": 13}):
        together = engines.run(quantized.engine(**options), *requests)
        for i, expected in enumerate(alone):
            assert_same(together[str(i)], expected)


def test_in_chunks_as_whole_and_from_the_prefix_cache_as_cold(quantized, prompts, alone):
    prompt, expected = max(zip(prompts, alone, strict=True), key=lambda pair: len(pair[0]))
    for size in (1, 7, len(prompt) - 1):
        assert_same(ask(quantized.engine(max_num_seqs=1, max_num_batched_tokens=size), prompt), expected)
    engine = quantized.engine()
    ask(engine, prompt, "cold")
    warm = ask(engine, prompt, "warm")
    assert warm.num_cached_tokens > 0
    assert_same(warm, expected)
