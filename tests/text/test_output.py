"""Engine outputs to user outputs: deltas, stop strings, failures, aborts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from izh.errors import RequestError
from izh.outputs import RequestOutput
from izh.request import Finish, Output, SamplingParams, TokenLogprobs
from izh.text.output import OutputProcessor, Processed
from izh.text.tokenizer import Tokenizer

TEXT = "the quick fox, 日本 😀; the END of it"


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, 1) for token_id in token_ids]


def steps(choice: str, token_ids: list[int], finish: Finish | None, size: int = 1) -> list[Output]:
    """The engine's outputs for one choice, `size` tokens a step, the last with `finish`."""
    groups = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
    return [
        Output(
            request_id=choice,
            token_ids=group,
            logprobs=logprobs_of(group),
            finish=finish if i == len(groups) - 1 else None,
        )
        for i, group in enumerate(groups)
    ]


def run(processor: OutputProcessor, outputs: list[Output]) -> tuple[list[RequestOutput], list[str]]:
    """One step per output; everything that became ready, and everything to abort."""
    ready: list[RequestOutput] = []
    abort: list[str] = []
    for output in outputs:
        processed = processor.process([output])
        ready += processed.ready
        abort += processed.abort
        assert not processed.failed
    return ready, abort


def total(deltas: list[RequestOutput]) -> RequestOutput:
    whole = RequestOutput(deltas[0].request_id, deltas[0].prompt_token_ids, [])
    for delta in deltas:
        whole.add(delta)
    return whole


def answer(tokenizer: Tokenizer, text: str = TEXT) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer)


@settings(max_examples=100, deadline=None)
@given(
    cut=st.integers(1, 40),
    size=st.integers(1, 5),
    stop=st.sampled_from([(), ("END",), ("fox, 日", "x,"), ("nowhere",), ("it",), ("本",)]),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 12, 200]),
)
def test_deltas_add_up_to_the_unstreamed_answer(
    tokenizer: Tokenizer, cut: int, size: int, stop: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    token_ids = answer(tokenizer)[:cut]
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    wholes = []
    for group in (size, len(token_ids)):
        processor = OutputProcessor(tokenizer)
        processor.add("r", [1, 2], params, "hello")
        deltas, abort = run(processor, steps("r/0", token_ids, Finish(reason="length"), group))
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert abort in ([], ["r/0"])
        assert len(processor) == 0
        wholes.append(total(deltas).outputs[0])
    streamed, unstreamed = wholes
    assert streamed == unstreamed
    assert streamed.token_ids == token_ids[: len(streamed.token_ids)]
    assert [entry.token_id for entry in streamed.logprobs or []] == streamed.token_ids
    if streamed.finish_reason == "length":
        assert streamed.text == tokenizer.decode(token_ids)
    else:
        assert streamed.stop_reason in stop
        seen = tokenizer.decode(streamed.token_ids)
        at = seen.index(str(streamed.stop_reason))
        assert streamed.text == seen[: at + len(str(streamed.stop_reason)) * include]
        assert len(streamed.token_ids) >= min_tokens


def test_a_stop_string_across_tokens_ends_the_choice_in_the_engine(
    tokenizer: Tokenizer, processor: OutputProcessor
) -> None:
    token_ids = answer(tokenizer, "the fox E") + answer(tokenizer, "N") + answer(tokenizer, "D and more")
    num_used = len(token_ids) - len(answer(tokenizer, "D and more")) + 1
    processor.add("r", [1], SamplingParams(stop=("END",), max_tokens=None))
    deltas, abort = run(processor, steps("r/0", token_ids, Finish(reason="length")))
    whole = total(deltas)
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == (
        "the fox ",
        "stop",
        "END",
    )
    assert whole.outputs[0].token_ids == token_ids[:num_used]
    assert abort == ["r/0"]
    assert len(deltas) == num_used
    assert deltas[-2].outputs[0].text == ""
    assert deltas[-2].outputs[0].token_ids == token_ids[num_used - 2 : num_used - 1]
    assert [delta.finished for delta in deltas] == [False] * (num_used - 1) + [True]


def test_a_stop_string_in_the_engines_last_output_needs_no_abort(
    tokenizer: Tokenizer, processor: OutputProcessor
) -> None:
    processor.add("r", [1], SamplingParams(stop=("END",), max_tokens=None))
    (output,) = steps("r/0", answer(tokenizer, "a END"), Finish(reason="length"), size=99)
    done = processor.process([output])
    assert done.abort == []
    assert (done.ready[0].outputs[0].text, done.ready[0].outputs[0].finish_reason) == ("a ", "stop")


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, True, "the fox"), (False, False, "the fox"), (True, True, "the fox"), (True, False, "the fox<|im_end|>")],
)
def test_the_token_that_ends_the_answer_has_no_text(
    tokenizer: Tokenizer, processor: OutputProcessor, stop: tuple[str, ...], include: bool, skip: bool, text: str
) -> None:
    token_ids = answer(tokenizer, "the fox<|im_end|>")
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip)
    processor.add("r", [1], params)
    deltas, abort = run(processor, steps("r/0", token_ids, Finish(reason="stop")))
    (choice,) = total(deltas).outputs
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == (text, token_ids, "stop", None)
    assert len(choice.logprobs or []) == len(token_ids)
    assert abort == []


def test_a_stop_id_is_the_reason_and_has_no_text(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    *token_ids, last = answer(tokenizer, "the fox")
    processor.add("r", [1], SamplingParams(stop_token_ids=(last,)))
    deltas, _ = run(processor, steps("r/0", [*token_ids, last], Finish(reason="stop", stop_reason=last)))
    (choice,) = total(deltas).outputs
    assert (choice.text, choice.stop_reason) == (tokenizer.decode(token_ids), last)


def test_an_unfinished_character_is_flushed(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    token_ids = answer(tokenizer, "ß")[:1]
    for stop in ((), ("zzz",)):
        processor.add("r", [1], SamplingParams(stop=stop))
        deltas, _ = run(processor, steps("r/0", token_ids, Finish(reason="length")))
        assert total(deltas).outputs[0].text == "\ufffd" == tokenizer.decode(token_ids)


def test_three_choices_are_told_together_and_end_apart(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    texts = ["the fox", "the END dog", "日本"]
    processor.add("r", [1, 2, 3], SamplingParams(n=3, stop=("END",), max_tokens=None), "prompt")
    prompt_logprobs = [None, *logprobs_of([2, 3])]
    queues = [steps(f"r/{i}", answer(tokenizer, text), Finish(reason="length")) for i, text in enumerate(texts)]
    for queue in queues:
        queue[0].num_cached_tokens = 2
        queue[0].prompt_logprobs = prompt_logprobs
    deltas: list[RequestOutput] = []
    abort: list[str] = []
    while any(queues):
        step = [queue.pop(0) for queue in queues if queue]
        done = processor.process(step)
        assert len(done.ready) <= 1
        deltas += done.ready
        abort += done.abort
    whole = total(deltas)
    assert [(c.index, c.text, c.finish_reason) for c in whole.outputs] == [
        (0, "the fox", "length"),
        (1, "the ", "stop"),
        (2, "日本", "length"),
    ]
    assert abort == ["r/1"]
    assert [delta.finished for delta in deltas].count(True) == 1
    assert deltas[-1].finished
    assert [delta.num_cached_tokens for delta in deltas] == [2] + [0] * (len(deltas) - 1)
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert whole.prompt_logprobs == prompt_logprobs
    assert {delta.prompt for delta in deltas} == {"prompt"}
    assert [choice.index for choice in deltas[0].outputs] == [0, 1, 2]


def test_several_steps_at_once_make_one_delta(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    token_ids = answer(tokenizer)
    processor.add("r", [1], SamplingParams(max_tokens=None))
    outputs = steps("r/0", token_ids, Finish(reason="length"))
    first = list(outputs[0].token_ids)
    done = processor.process(outputs)
    (delta,) = done.ready
    assert delta.finished
    assert (delta.outputs[0].token_ids, delta.outputs[0].text) == (token_ids, TEXT)
    assert outputs[0].token_ids == first


def test_late_and_unknown_outputs_are_ignored(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    processor.add("r", [1], SamplingParams(stop=("E",), max_tokens=None))
    assert processor.process(steps("r/0", answer(tokenizer, "E"), None)).abort == ["r/0"]
    late = steps("r/0", answer(tokenizer, "more"), Finish(reason="abort"))
    assert processor.process([*late, *steps("other/0", [1], None)]) == Processed()


def test_a_failed_choice_fails_the_request(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    processor.add("r", [1], SamplingParams(n=4))
    processor.add("s", [1], SamplingParams())
    token_ids = answer(tokenizer, "the fox")
    processor.process(steps("r/3", token_ids, Finish(reason="length"), size=99))
    error = Finish(reason="error", error="boom", kind="RequestError")
    done = processor.process(
        [
            *steps("r/0", token_ids, None),
            *steps("s/0", token_ids, None),
            Output(request_id="r/1", finish=error),
            Output(request_id="r/2", finish=error),
            *steps("r/0", token_ids, None),
        ]
    )
    assert done.failed == [("r", error)]
    assert done.abort == ["r/0", "r/2"]
    assert [output.request_id for output in done.ready] == ["s"]
    assert len(processor) == 1
    assert processor.abort("r") == []


def test_abort_forgets_the_request(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    processor.add("r", [1], SamplingParams(n=3))
    processor.process(steps("r/1", answer(tokenizer, "a"), Finish(reason="length"), size=9))
    assert processor.abort("r") == ["r/0", "r/2"]
    assert processor.abort("r") == processor.abort("never") == []
    assert processor.process(steps("r/0", [5], Finish(reason="abort"))) == Processed()
    assert len(processor) == 0
    processor.add("r", [1], SamplingParams())


def test_the_engines_abort_ends_the_choice(tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    processor.add("r", [1], SamplingParams(stop=("fox!",)))
    deltas, _ = run(processor, steps("r/0", answer(tokenizer, "the fo"), None))
    done = processor.process([Output(request_id="r/0", finish=Finish(reason="abort"))])
    (choice,) = total(deltas + done.ready).outputs
    assert (choice.text, choice.finish_reason) == ("the fo", "abort")
    assert done.ready[0].finished
    assert done.abort == []


def test_an_id_in_use_is_refused(processor: OutputProcessor) -> None:
    processor.add("r", [1], SamplingParams())
    with pytest.raises(RequestError, match="'r' is in use"):
        processor.add("r", [1], SamplingParams())


def test_impossible_prompt_ids_wait_for_the_engines_refusal(processor: OutputProcessor) -> None:
    processor.add("r", [-1, 2**40], SamplingParams())
    error = Finish(reason="error", error="token id", kind="RequestError")
    assert processor.process([Output(request_id="r/0", finish=error)]).failed == [("r", error)]
