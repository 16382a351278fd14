"""What scheduling may never change, on the real model: an answer is the same alone, in a batch, in chunks of any size,
from the prefix cache, and after preemption.

Token ids must be equal. Log-probabilities may differ in the last bits, since a matrix product's order of additions
depends on its number of rows: the bound is 2e-4 absolute.
"""

import engines
import pytest
from prompts import PROMPTS

from izh.request import Finish

LOGPROB_BOUND = 2e-4


def assert_same(output, expected):
    assert output.token_ids == expected.token_ids
    assert output.finish == expected.finish
    for mine, theirs in zip(output.logprobs, expected.logprobs, strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_BOUND)


@pytest.fixture(scope="module")
def prompts(demo_tokenizer):
    return [demo_tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def alone(demo, prompts):
    """Each prompt's answer in an engine of its own."""
    return [ask(demo.engine(), prompt) for prompt in prompts]


def ask(engine, prompt, name="it", **params):
    return engines.run(engine, engines.request(name, prompt, logprobs=0, **params))[name]


def test_in_a_batch_as_alone(demo, prompts, alone):
    requests = [engines.request(str(i), prompt, logprobs=0) for i, prompt in enumerate(prompts)]
    together = engines.run(demo.engine(), *requests)
    for i, expected in enumerate(alone):
        assert_same(together[str(i)], expected)


@pytest.mark.parametrize("name", ["izh's", "oneDNN's", "torch's", "both"])
def test_with_every_kernel_of_linear_layers_as_with_the_fastest(demo_source, prompts, alone, name):
    engine = engines.load(demo_source, **engines.KERNELS[name]).engine(max_num_batched_tokens=80)
    together = engines.run(engine, *(engines.request(str(i), p, logprobs=0) for i, p in enumerate(prompts)))
    for i, expected in enumerate(alone):
        assert_same(together[str(i)], expected)


def test_in_chunks_of_every_size_as_whole(demo, prompts, alone):
    prompt, expected = prompts[16], alone[16]
    for size in range(1, len(prompt) + 2):
        engine = demo.engine(max_num_seqs=1, max_num_batched_tokens=size)
        assert_same(ask(engine, prompt), expected)


def test_in_small_chunks_beside_others_as_alone(demo, prompts, alone):
    engine = demo.engine(max_num_seqs=5, max_num_batched_tokens=13)
    together = engines.run(engine, *(engines.request(str(i), p, logprobs=0) for i, p in enumerate(prompts)))
    for i, expected in enumerate(alone):
        assert_same(together[str(i)], expected)


def test_from_the_prefix_cache_as_cold(demo, prompts, alone):
    engine = demo.engine()
    for i, prompt in enumerate(prompts):
        ask(engine, prompt, name=f"cold{i}")
    for i, (prompt, expected) in enumerate(zip(prompts, alone, strict=True)):
        again = ask(engine, prompt, name=f"warm{i}")
        assert again.num_cached_tokens == min(len(prompt) // 16 * 16, len(prompt) - 1)
        assert_same(again, expected)


def test_a_full_hit_recomputes_just_the_last_token(demo, prompts, alone):
    engine = demo.engine()
    prompt = prompts[18][:32]
    cold, warm = ask(engine, prompt, name="cold"), ask(engine, prompt, name="warm")
    assert warm.num_cached_tokens == 31
    assert_same(warm, cold)


def test_a_continued_answer_hits_generated_blocks_too(demo, prompts, alone):
    engine = demo.engine()
    first = ask(engine, prompts[18], name="first", max_tokens=40)
    longer = prompts[18] + first.token_ids[:30]
    warm = ask(engine, longer, name="warm")
    assert warm.num_cached_tokens >= len(longer) // 16 * 16
    assert warm.token_ids[:10] == first.token_ids[30:40]
    assert_same(warm, ask(demo.engine(), longer))


@pytest.mark.parametrize("num_blocks", [14, 20, 33])
def test_preempted_as_never_preempted(demo, prompts, alone, num_blocks):
    engine = demo.engine(num_blocks=num_blocks, max_num_batched_tokens=64, max_num_seqs=16)
    together = engines.run(engine, *(engines.request(str(i), p, logprobs=0) for i, p in enumerate(prompts)))
    assert engine.stats.num_preempted > 0
    assert engine.stats.kv_usage == 0.0
    for i, expected in enumerate(alone):
        assert_same(together[str(i)], expected)


def test_seeded_sampling_is_the_same_alone_batched_chunked_and_preempted(demo, prompts):
    def requests(names):
        return [
            engines.request(str(i), prompts[i], temperature=0.8, top_p=0.9, seed=i, logprobs=0, max_tokens=24)
            for i in names
        ]

    alone = {str(i): engines.run(demo.engine(), *requests([i]))[str(i)] for i in range(8)}
    batched = engines.run(demo.engine(), *requests(range(8)))
    chunked = engines.run(demo.engine(max_num_seqs=4, max_num_batched_tokens=7), *requests(reversed(range(8))))
    tight = demo.engine(num_blocks=10, max_num_batched_tokens=64)
    preempted = engines.run(tight, *requests(range(8)))
    assert tight.stats.num_preempted > 0
    for name, expected in alone.items():
        for other in (batched, chunked, preempted):
            assert_same(other[name], expected)


def test_choices_of_one_request_share_its_prompt_and_differ_by_their_stream(demo, prompts):
    engine = demo.engine()
    choices = [engines.request(f"r/{i}", prompts[18], choice=i, temperature=1.0, seed=7, logprobs=0) for i in range(4)]
    outputs = engines.run(engine, *choices)
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 4
    assert engine.stats.prefix_hit_tokens == 3 * (len(prompts[18]) // 16 * 16)
    for i, choice in enumerate(choices):
        assert_same(outputs[f"r/{i}"], engines.run(demo.engine(), choice)[f"r/{i}"])


def test_prompt_logprobs_are_the_same_cold_warm_and_chunked(demo, prompts):
    prompt = prompts[18]
    engine = demo.engine()
    cold = ask(engine, prompt, name="cold", prompt_logprobs=3)
    warm = ask(engine, prompt, name="warm", prompt_logprobs=3)
    chunked = ask(demo.engine(max_num_seqs=1, max_num_batched_tokens=9), prompt, prompt_logprobs=3)
    assert cold.prompt_logprobs[0] is None
    assert len(cold.prompt_logprobs) == len(prompt)
    for other in (warm, chunked):
        assert_same(other, cold)
        for mine, theirs in zip(other.prompt_logprobs[1:], cold.prompt_logprobs[1:], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_BOUND)
            assert mine.rank == theirs.rank


def test_an_aborted_request_leaves_others_unchanged_and_no_block_held(demo, prompts, alone):
    engine = demo.engine(max_num_batched_tokens=32, max_num_seqs=8)
    for i in range(8):
        engine.add(engines.request(str(i), prompts[i], logprobs=0))
    engine.add(engines.request("gone", prompts[18], max_tokens=200))
    for _ in range(6):
        first = engine.step()
        assert not any(output.finish for output in first)
    engine.abort("gone")
    outputs = engines.drain(engine)
    assert outputs["gone"].finish == Finish(reason="abort")
    assert engine.stats.kv_usage == 0.0
    for i in range(8):
        assert outputs[str(i)].token_ids == alone[i].token_ids[-len(outputs[str(i)].token_ids) :]
