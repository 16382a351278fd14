"""The asynchronous face over a real engine process with a tiny model: streams, aborts, death and return."""

import asyncio
import contextlib
import os
import shutil
import signal

import adapters_made
import numpy as np
import pytest
import pytest_asyncio
import tiny_checkpoint

from izh.engine.async_llm import AsyncLLM
from izh.errors import ContextLengthError, EngineDeadError, ModelLoadError, OptionError, RequestError
from izh.outputs import RequestOutput
from izh.request import PoolingParams, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(checkpoint):
    llm = AsyncLLM(model=str(checkpoint), kv_cache_gb=0.01, num_threads=1)
    await llm.start()
    yield llm
    await llm.shutdown()


async def collect(stream):
    whole = None
    async for item in stream:
        if whole is None:
            whole = item
        else:
            whole.add(item)
    return whole


async def until(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def gauge(llm, name):
    line = next(line for line in llm.metrics.render().decode().splitlines() if line.startswith(f"izh:{name}"))
    return float(line.rpartition(" ")[2])


async def test_a_stream_adds_up_and_repeats(llm):
    first = await collect(llm.generate("the quick", GREEDY))
    assert isinstance(first, RequestOutput)
    assert first.finished
    assert len(first.outputs[0].token_ids) == 12
    assert first.outputs[0].finish_reason == "length"
    assert first.prompt_token_ids == llm.tokenizer.encode("the quick")
    again = await collect(llm.generate(first.prompt_token_ids, GREEDY))
    assert again.outputs[0].text == first.outputs[0].text


async def test_many_at_once_answer_as_alone(llm):
    prompts = [f"hello {i} world" for i in range(20)]
    together = await asyncio.gather(*(collect(llm.generate(p, GREEDY)) for p in prompts))
    for prompt, output in zip(prompts, together, strict=True):
        alone = await collect(llm.generate(prompt, GREEDY))
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


async def test_a_prompt_is_embedded_among_answers(llm):
    prompts = [f"hello {i} world" for i in range(6)]
    alone = [(await llm.embed(prompt)).vector for prompt in prompts]
    answer = await collect(llm.generate("the quick", GREEDY))
    *vectors, beside = await asyncio.gather(
        *(llm.embed(prompt) for prompt in prompts), collect(llm.generate("the quick", GREEDY))
    )
    assert beside.outputs[0].text == answer.outputs[0].text
    for output, vector, prompt in zip(vectors, alone, prompts, strict=True):
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert np.linalg.norm(output.vector) == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(output.vector, vector, atol=1e-5)


async def test_an_embedding_that_cannot_be_raises(llm):
    with pytest.raises(ContextLengthError, match="257 tokens"):
        await llm.embed([5] * 257)
    with pytest.raises(RequestError, match="no_such"):
        await llm.embed("hello", adapters=(("no_such", 1.0),))
    assert (await llm.embed([5] * 256)).num_cached_tokens == 0, "a prompt may fill the context"


async def test_an_embedding_given_up_is_aborted(llm):
    waiting = [asyncio.create_task(llm.embed([7 + i] * 250, PoolingParams(mode="mean"))) for i in range(20)]
    await asyncio.sleep(0.02)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await collect(llm.generate("the quick", GREEDY))  # whose steps tell the gauges
    await until(lambda: gauge(llm, "num_requests_running") == 0 and gauge(llm, "kv_cache_usage_perc") == 0)


async def test_choices_come_back_under_one_request(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    output = await collect(llm.generate("the lazy dog", params))
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1


async def test_a_stop_string_ends_the_request_in_the_engine_too(llm):
    whole = await collect(llm.generate("the quick", GREEDY))
    text = whole.outputs[0].text
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=text[4:7])
    output = await collect(llm.generate("the quick", params))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == text[4:7]
    assert output.outputs[0].text == text[: text.index(text[4:7])]
    await collect(llm.generate("hello", GREEDY))
    await until(lambda: gauge(llm, "num_requests_running") == 0)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], GREEDY, RequestError),
        ([10**6], GREEDY, RequestError),
        (list(range(3, 303)), GREEDY, ContextLengthError),
        ("x", SamplingParams(max_tokens=256), ContextLengthError),
        ("x", SamplingParams(stop_token_ids=(10**6,)), RequestError),
    ],
)
async def test_bad_requests_raise_before_the_first_item(llm, prompt, params, error):
    with pytest.raises(error):
        await anext(llm.generate(prompt, params))


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(llm):
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    expected = await collect(llm.generate("the quick", params))
    first = llm.generate("the quick", params, request_id="same")
    whole = await anext(first)
    with pytest.raises(RequestError, match="'same' is in use") as caught:
        await anext(llm.generate("hello", params, request_id="same"))
    assert caught.value.param == "request_id"
    async with asyncio.timeout(30):
        async for item in first:
            whole.add(item)
    assert whole.outputs[0].token_ids == expected.outputs[0].token_ids


async def test_closing_a_stream_frees_the_engine(llm):
    stream = llm.generate("the quick brown", SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    await collect(llm.generate("hello", GREEDY))
    await until(lambda: gauge(llm, "kv_cache_usage_perc") == 0.0)


async def test_cancelling_the_reader_frees_the_engine(llm):
    task = asyncio.create_task(
        collect(llm.generate("the quick brown", SamplingParams(n=4, max_tokens=200, ignore_eos=True)))
    )
    await until(lambda: gauge(llm, "num_requests_running") > 0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await collect(llm.generate("hello", GREEDY))
    await until(lambda: gauge(llm, "kv_cache_usage_perc") == 0.0)


async def test_when_the_engine_dies_live_requests_fail_and_a_new_engine_serves(llm):
    before = await collect(llm.generate("the quick", GREEDY))
    stream = llm.generate("the quick brown", SamplingParams(max_tokens=230, ignore_eos=True))
    await anext(stream)
    os.kill(llm.engine_pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="died"):
        async for _ in stream:
            pass
    assert llm.state == "dead"
    with pytest.raises(EngineDeadError, match="not ready"):
        await anext(llm.generate("hello", GREEDY))
    await until(lambda: llm.state == "ready")
    after = await collect(llm.generate("the quick", GREEDY))
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


async def test_a_new_engine_knows_the_adapters_that_the_old_one_knew(checkpoint, tmp_path):
    """Loaded, replaced and unloaded at run time; one whose directory is gone by then is gone too."""
    for seed, name in enumerate(("first", "second", "third", "gone")):
        adapters_made.make(checkpoint, tmp_path / name, seed)
    start = (f"given={tmp_path / 'first'}", f"dropped={tmp_path / 'first'}", f"changed={tmp_path / 'first'}")
    llm = AsyncLLM(model=str(checkpoint), kv_cache_gb=0.01, num_threads=1, lora=start)
    await llm.start()
    try:
        await llm.load_lora("loaded", tmp_path / "third")
        await llm.load_lora("gone", tmp_path / "gone")
        await llm.load_lora("changed", tmp_path / "second", replace=True)
        await llm.unload_lora("dropped")
        before = {
            name: await collect(llm.generate("the quick", GREEDY, adapters=((name, 1.0),)))
            for name in ("given", "loaded", "changed")
        }
        shutil.rmtree(tmp_path / "gone")
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="died"):
            await llm.load_lora("late", tmp_path / "first")
        await until(lambda: llm.state == "ready")
        known = {name: directory.name for name, directory in llm.info.adapters.items()}
        assert known == {"given": "first", "changed": "second", "loaded": "third"}
        for name, answer in before.items():
            again = await collect(llm.generate("the quick", GREEDY, adapters=((name, 1.0),)))
            assert again.outputs[0].token_ids == answer.outputs[0].token_ids
    finally:
        await llm.shutdown()


async def test_a_model_that_cannot_be_loaded_says_why(tmp_path):
    llm = AsyncLLM(model=str(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match="nothing"):
        await llm.start()


async def test_an_option_that_cannot_be_met_says_why(checkpoint):
    llm = AsyncLLM(model=str(checkpoint), max_model_len=100_000)
    with pytest.raises(OptionError, match=r"--max-model-len 100000 exceeds the model's 256 tokens"):
        await llm.start()
