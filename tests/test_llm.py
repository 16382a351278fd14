"""The offline face on a tiny model: order, parameters one each, and refusals that leave nothing running."""

import pytest
import tiny_checkpoint

from izh import LLM, SamplingParams
from izh.errors import ContextLengthError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint.save_llama(tmp_path_factory.mktemp("offline") / "tiny")
    return LLM(str(folder), quiet=True, kv_cache_gb=0.01)


def test_answers_come_in_the_order_of_the_prompts(llm):
    prompts = ["hello", "the quick brown fox", "dog"]
    together = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in together] == prompts
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.finished


def test_params_may_be_one_each(llm):
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(["hello", "hello"], [short, GREEDY])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 8]
    with pytest.raises(ValueError, match="2 prompts but 1 params"):
        llm.generate(["hello", "hello"], [short])
    with pytest.raises(ValueError, match="2 prompts but 1 lora"):
        llm.generate(["hello", "hello"], GREEDY, lora=["support"])


@pytest.mark.parametrize(
    ("bad", "error"), [("half \ud800", RequestError), ("x " * 300, ContextLengthError), ("", RequestError)]
)
def test_a_refused_prompt_leaves_nothing_running(llm, bad, error):
    with pytest.raises(error):
        llm.generate(["hello", "the quick", bad], SamplingParams(max_tokens=100, ignore_eos=True))
    before = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    steps = list(llm.stream("hello", GREEDY))
    assert len(steps) == 8, "each step answers this request alone"
    assert [token for step in steps for token in step.outputs[0].token_ids] == before


def test_streams_read_in_turns_each_get_their_own_answer(llm):
    expected = {p: llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in ("hello", "the quick")}
    got = {prompt: [] for prompt in expected}
    streams = {prompt: llm.stream(prompt, GREEDY) for prompt in expected}
    for prompt, stream in streams.items():
        got[prompt] += next(stream).outputs[0].token_ids
    between = llm.generate("dog", GREEDY)
    for prompt, stream in streams.items():
        for piece in stream:
            got[prompt] += piece.outputs[0].token_ids
    assert got == expected
    assert between[0].prompt == "dog"


def test_a_closed_stream_is_aborted(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert len(list(llm.stream("hello", GREEDY))) == 8


def test_an_adapter_that_is_not_loaded_is_refused(llm):
    with pytest.raises(RequestError, match="adapter 'support' is not loaded here"):
        llm.generate("hello", GREEDY, lora="support")
