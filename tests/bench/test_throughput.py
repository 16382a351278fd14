"""How times become rates, and who is asked what, with engines whose speed is known."""

import io

import pytest
from rich.console import Console

from izh.bench import throughput
from izh.bench.options import ThroughputOptions
from izh.bench.throughput import PromptSource, agreement, check, figure, measure, table, timed
from izh.config import EngineOptions
from izh.errors import OptionError


class Clocked:
    """An engine on a clock of its own: prefill at 1000 tokens/s, decode at `decode` tokens/s."""

    now = 0.0

    def __init__(self, name: str, decode: float, log: list[str], drift: int = 0) -> None:
        self.name = name
        self.prompts: list[tuple[int, ...]] = []
        self._decode = decode
        self._log = log
        self._drift = drift

    def answer(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        self.prompts += map(tuple, prompts)
        self._log.append(f"{self.name} {len(prompts)}x{num_tokens}")
        num_prompt = sum(map(len, prompts))
        Clocked.now += num_prompt / 1000 + len(prompts) * (num_tokens - 1) / self._decode
        return [[*range(num_tokens - self._drift), *[-1] * self._drift] for _ in prompts]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Clocked.now = 0.0
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: Clocked.now)


def test_rates_are_what_the_engines_do() -> None:
    log: list[str] = []
    engines = [Clocked("ours", 50, log), Clocked("theirs", 25, log, drift=1)]
    ours, theirs = measure(engines, PromptSource(100, frozenset(), 16), batch=4, num_tokens=9, repeats=3)
    assert (ours.prefill, ours.decode) == (pytest.approx(1000), pytest.approx(50))
    assert (theirs.prefill, theirs.decode) == (pytest.approx(1000), pytest.approx(25))
    assert (ours.engine, ours.batch, ours.agreement) == ("ours", 4, 1.0)
    assert theirs.agreement == pytest.approx(9 / 10)


def test_turns_are_interleaved_and_prompts_shared_but_never_repeated() -> None:
    log: list[str] = []
    engines = [Clocked("a", 50, log), Clocked("b", 50, log)]
    measure(engines, PromptSource(1000, frozenset(), 16), batch=2, num_tokens=4, repeats=2)
    warm_up, timed_calls = log[:2], log[2:]
    assert warm_up == ["a 2x2", "b 2x2"]
    assert timed_calls == ["a 2x1", "b 2x1", "a 2x5", "b 2x5", "b 2x1", "a 2x1", "b 2x5", "a 2x5"]
    for engine in engines:
        assert len(set(engine.prompts)) == len(engine.prompts)
    assert set(engines[0].prompts[2:]) == set(engines[1].prompts[2:])


def test_prompts_are_of_ordinary_tokens_and_repeatable() -> None:
    def take() -> list[list[int]]:
        return PromptSource(10, frozenset({0, 9}), 50).take(3)

    prompts = take()
    assert {len(prompt) for prompt in prompts} == {50}
    assert {token for prompt in prompts for token in prompt} == set(range(1, 9))
    assert prompts == take()


def test_a_short_answer_is_noticed() -> None:
    class Lazy(Clocked):
        def answer(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
            return [[0]]

    with pytest.raises(AssertionError, match="asked for 5"):
        timed(Lazy("lazy", 1, []), [[1]], 5)


def test_times_that_say_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="no measurable time"):
        figure("izh", 1, 128, 4, first_s=1.0, whole_s=0.9, agreement=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ThroughputOptions(batch=(1, 0)), "--batch must be at least 1, got 0"),
        (ThroughputOptions(repeats=0), "--repeats"),
        (ThroughputOptions(output_tokens=0), "--output-tokens"),
        (ThroughputOptions(batch=(65,)), "--batch 65 exceeds --max-num-seqs 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: ThroughputOptions, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check(EngineOptions(), options)


def test_agreement() -> None:
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75


def test_the_table_shows_rates_and_ratios() -> None:
    figures = [
        figure("izh", 8, 128, 64, first_s=1.024, whole_s=2.048, agreement=1.0),
        figure("transformers", 8, 128, 64, first_s=2.048, whole_s=4.096, agreement=0.5),
    ]
    machine = {"processor": "cpu", "threads": 2, "torch": "2"}
    document = {
        "model": "demo",
        "dtype": "fp32",
        "machine": machine,
        "options": {"prompt_tokens": 128, "repeats": 3},
        "date": "today",
    }
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(figures, document))
    rows = [line for line in console.export_text().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["8", "izh", "1000", "", "500", "", ""],
        ["", "transformers", "500", "2.00", "250", "2.00", "50.0%"],
    ]
