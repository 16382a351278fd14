"""How engines are timed against each other, and how times become rates.

Owns: prompts that no engine has seen, the order of turns, the clock, and the definition of both rates.
Must not know: how any engine works, what is reported.

Each repeat asks every engine in turn for the same prompts, first for 1 token each, then (other prompts) for n + 1:

    prefill rate = batch * prompt_tokens / T(1)               the first token of every prompt, its sampling included
    decode rate  = batch * n / (T(n + 1) - T(1))              the n tokens after it: what they add to the time

T is the median over the repeats. Prompts are random tokens, never used twice by an engine, so nothing is read from a
prefix cache. The first call of each shape is not timed.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from izh.bench.contestants import Contestant
from izh.bench.options import TimingOptions, at_least_one
from izh.config import EngineOptions
from izh.errors import OptionError

Prompts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """One engine at one batch size. Rates in tokens/s, times (the medians) in seconds.

    `spread` is how much longer the slowest repeat took than the fastest, as a share of the fastest: the larger one of
    T(1)'s and T(n + 1)'s.
    """

    engine: str
    batch: int
    prefill: float
    decode: float
    first_s: float
    whole_s: float
    spread: float


class PromptSource:
    """Random prompts of one length, of ordinary tokens. The same ones in the same order at every run; those of another
    seed begin otherwise."""

    def __init__(self, vocab_size: int, special_ids: frozenset[int], length: int, seed: int = 0) -> None:
        self._ids = [token for token in range(vocab_size) if token not in special_ids]
        self._length = length
        self._random = random.Random(seed)

    def take(self, count: int) -> Prompts:
        """Prompts never given out before."""
        return [self._random.choices(self._ids, k=self._length) for _ in range(count)]


def check(engine: EngineOptions, timing: TimingOptions, batches: Sequence[int]) -> None:
    """Raises OptionError for what cannot be measured."""
    at_least_one(timing, "prompt_tokens", "output_tokens", "repeats")
    check_batches(engine, batches)


def check_batches(engine: EngineOptions, batches: Sequence[int]) -> None:
    """Raises OptionError for what would not run at once."""
    if min(batches) < 1:
        raise OptionError(f"--batch must be at least 1, got {min(batches)}")
    if max(batches) > engine.max_num_seqs:
        raise OptionError(
            f"--batch {max(batches)} exceeds --max-num-seqs {engine.max_num_seqs}: it would not run at once; "
            "raise --max-num-seqs"
        )


def explicit(engine: EngineOptions) -> EngineOptions:
    """The options with device and dtype spelled out, so that all engines get the same ones."""
    device = engine.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return replace(engine, device=device, dtype=engine.dtype or ("fp32" if device == "cpu" else "bf16"))


def num_calls(num_engines: int, repeats: int) -> int:
    """How often `measure` asks an engine something."""
    return num_engines * (1 + 2 * repeats)


def measure(
    contestants: Sequence[Contestant],
    prompts: PromptSource,
    batch: int,
    num_tokens: int,
    repeats: int,
    after_call: Callable[[], None] = lambda: None,
) -> list[tuple[Rates, Prompts]]:
    """Rates of each contestant, and its answers to all long questions. Names must differ.

    Turns are interleaved, and their order is reversed from repeat to repeat, so that a disturbance of the machine hits
    all alike.
    """
    for contestant in contestants:
        contestant.answer(prompts.take(batch), 2)
        after_call()
    first_s: dict[str, list[float]] = {each.name: [] for each in contestants}
    whole_s: dict[str, list[float]] = {each.name: [] for each in contestants}
    answers: dict[str, Prompts] = {each.name: [] for each in contestants}
    for repeat in range(repeats):
        short, long = prompts.take(batch), prompts.take(batch)
        order = contestants if repeat % 2 == 0 else contestants[::-1]
        for each in order:
            seconds, _ = timed(each, short, 1, repeat)
            first_s[each.name].append(seconds)
            after_call()
        for each in order:
            seconds, tokens = timed(each, long, num_tokens + 1, repeat)
            whole_s[each.name].append(seconds)
            answers[each.name] += tokens
            after_call()
    prompt_tokens = len(short[0])
    return [
        (rates(name, batch, prompt_tokens, num_tokens, first_s[name], whole_s[name]), tokens)
        for name, tokens in answers.items()
    ]


def timed(contestant: Contestant, prompts: Prompts, num_tokens: int, turn: int = 0) -> tuple[float, Prompts]:
    """Seconds, and the answers, each checked to be as long as it was asked to be."""
    start = time.perf_counter()
    answers = contestant.answer(prompts, num_tokens, turn)
    seconds = time.perf_counter() - start
    lengths = {len(answer) for answer in answers}
    assert lengths == {num_tokens}, f"{contestant.name}: answers of {lengths} tokens, asked for {num_tokens}"
    return seconds, answers


def rates(
    engine: str, batch: int, prompt_tokens: int, num_tokens: int, firsts_s: Sequence[float], wholes_s: Sequence[float]
) -> Rates:
    """T(1) and T(n + 1) of every repeat to rates. Raises OptionError when the answers are too short for the clock to
    see the decode steps."""
    first_s, whole_s = statistics.median(firsts_s), statistics.median(wholes_s)
    if whole_s <= first_s:
        raise OptionError(
            f"{engine}, batch {batch}: {num_tokens} more tokens took no measurable time ({whole_s:.3f} s against "
            f"{first_s:.3f} s); raise --output-tokens or --repeats, or quiet the machine"
        )
    return Rates(
        engine=engine,
        batch=batch,
        prefill=batch * prompt_tokens / first_s,
        decode=batch * num_tokens / (whole_s - first_s),
        first_s=first_s,
        whole_s=whole_s,
        spread=max(max(times) / min(times) for times in (firsts_s, wholes_s)) - 1,
    )


def agreement(reference: Prompts, answers: Prompts) -> float:
    """Share of equal tokens at equal places, 0..1."""
    pairs = [pair for a, b in zip(reference, answers, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)
