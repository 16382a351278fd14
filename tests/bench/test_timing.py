"""How times become rates, and who is asked what, with engines whose speed is known."""

import clocked
import pytest

from izh.bench import timing
from izh.bench.options import ThroughputOptions, TimingOptions
from izh.bench.timing import PromptSource, agreement, check, measure, num_calls, rates, timed
from izh.config import EngineOptions
from izh.errors import OptionError


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked.install(monkeypatch)


def test_rates_are_what_the_engines_do() -> None:
    log: list[str] = []
    engines = [clocked.Clocked("ours", 50, log), clocked.Clocked("theirs", 25, log, drift=1)]
    measured = measure(engines, PromptSource(100, frozenset(), 16), batch=4, num_tokens=9, repeats=3)
    (ours, our_answers), (theirs, their_answers) = measured
    assert (ours.engine, ours.batch) == ("ours", 4)
    assert (ours.prefill, ours.decode) == (pytest.approx(1000), pytest.approx(50))
    assert (theirs.prefill, theirs.decode) == (pytest.approx(1000), pytest.approx(25))
    assert len(our_answers) == 3 * 4
    assert agreement(our_answers, their_answers) == pytest.approx(9 / 10)


def test_turns_are_interleaved_and_prompts_shared_but_never_repeated() -> None:
    log: list[str] = []
    engines = [clocked.Clocked("a", 50, log), clocked.Clocked("b", 50, log)]
    measure(engines, PromptSource(1000, frozenset(), 16), batch=2, num_tokens=4, repeats=2)
    warm_up, timed_calls = log[:2], log[2:]
    assert warm_up == ["a 2x2", "b 2x2"]
    assert timed_calls == ["a 2x1", "b 2x1", "a 2x5", "b 2x5", "b 2x1", "a 2x1", "b 2x5", "a 2x5"]
    for engine in engines:
        assert len(set(engine.prompts)) == len(engine.prompts)
    assert set(engines[0].prompts[2:]) == set(engines[1].prompts[2:])


def test_a_turn_is_a_repeat_and_every_call_is_told() -> None:
    engines = [clocked.Clocked("a", 50, []), clocked.Clocked("b", 50, [])]
    calls: list[float] = []
    measure(engines, PromptSource(1000, frozenset(), 4), 2, 4, 3, lambda: calls.append(clocked.Clocked.now))
    assert [engine.turns for engine in engines] == [[0, 0, 0, 1, 1, 2, 2]] * 2
    assert len(calls) == num_calls(num_engines=2, repeats=3) == 14
    assert len(set(calls)) == 14


def test_prompts_are_of_ordinary_tokens_and_repeatable() -> None:
    def take() -> list[list[int]]:
        return PromptSource(10, frozenset({0, 9}), 50).take(3)

    prompts = take()
    assert {len(prompt) for prompt in prompts} == {50}
    assert {token for prompt in prompts for token in prompt} == set(range(1, 9))
    assert prompts == take()


def test_a_short_answer_is_noticed() -> None:
    class Lazy(clocked.Clocked):
        def answer(self, prompts: list[list[int]], num_tokens: int, turn: int = 0) -> list[list[int]]:
            return [[0]]

    with pytest.raises(AssertionError, match="asked for 5"):
        timed(Lazy("lazy", 1, []), [[1]], 5)


def test_rates_are_of_the_medians_and_the_spread_of_the_extremes() -> None:
    one = rates("izh", 2, 50, 10, [1.0, 9.0, 1.25], [2.25, 2.5, 2.0])
    assert (one.first_s, one.whole_s) == (1.25, 2.25)
    assert (one.prefill, one.decode) == (80, 20)
    assert one.spread == pytest.approx(8.0)
    assert rates("izh", 2, 50, 10, [1.0, 1.0], [2.0, 2.5]).spread == pytest.approx(0.25)


def test_times_that_say_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="no measurable time"):
        rates("izh", 1, 128, 4, [1.0], [0.9])


@pytest.mark.parametrize(
    ("options", "batches", "message"),
    [
        (TimingOptions(), (1, 0), "--batch must be at least 1, got 0"),
        (TimingOptions(repeats=0), (1,), "--repeats"),
        (TimingOptions(prompt_tokens=-1), (1,), "--prompt-tokens must be at least 1, got -1"),
        (ThroughputOptions(output_tokens=0), (1,), "--output-tokens"),
        (TimingOptions(), (8, 65), "--batch 65 exceeds --max-num-seqs 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: TimingOptions, batches: tuple[int, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check(EngineOptions(), options, batches)


def test_both_engines_get_one_device_and_dtype() -> None:
    assert timing.explicit(EngineOptions(device="cpu")).dtype == "fp32"
    assert timing.explicit(EngineOptions(device="cuda")).dtype == "bf16"
    assert timing.explicit(EngineOptions(device="cuda", dtype="fp16")).dtype == "fp16"
    assert timing.explicit(EngineOptions()).device in ("cpu", "cuda")


def test_agreement() -> None:
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75
