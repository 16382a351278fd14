"""What the benchmarks of embeddings and reranking share: whose turn it is, and what times become.

Owns: the order of turns, the clock, Speed. Must not know: what is timed.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

from izh.errors import OptionError

Answer = TypeVar("Answer")

SENTENCE_TRANSFORMERS = "sentence-transformers"
HOW_TO_INSTALL = {SENTENCE_TRANSFORMERS: "pip install sentence-transformers"}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One engine at one piece of work. `seconds` is the median over the repeats."""

    engine: str
    seconds: float
    spread: float
    """How much longer the slowest repeat took than the fastest, as a share of the fastest."""


def take_turns(
    contestants: Mapping[str, Callable[[], Answer]], repeats: int, after_call: Callable[[], None] = lambda: None
) -> list[tuple[Speed, list[Answer]]]:
    """Time every contestant `repeats` times, one after the other, the order reversed from repeat to repeat, so that a
    disturbance of the machine hits all alike. Each runs once before, untimed. Returns what was timed, and the answers,
    the untimed first."""
    answers = {}
    for name, ask in contestants.items():
        answers[name] = [ask()]
        after_call()
    times_s: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name in list(contestants) if repeat % 2 == 0 else list(contestants)[::-1]:
            start = time.perf_counter()
            answers[name].append(contestants[name]())
            times_s[name].append(time.perf_counter() - start)
            after_call()
    return [(speed(name, times_s[name]), answers[name]) for name in contestants]


def speed(engine: str, times_s: Sequence[float]) -> Speed:
    """Times of equal work."""
    return Speed(engine=engine, seconds=statistics.median(times_s), spread=max(times_s) / min(times_s) - 1)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def why_no_sentence_transformers(peer: bool) -> str | None:
    """Why it is left out; None when it is there."""
    if not peer:
        return "--no-peer"
    if find_spec("sentence_transformers") is None:
        return f"not installed: {HOW_TO_INSTALL[SENTENCE_TRANSFORMERS]}"
    return None


def threads_of(num_threads: int | None) -> int:
    """As many as asked for, else as this process may use. Raises OptionError for none."""
    if num_threads is not None and num_threads < 1:
        raise OptionError(f"--num-threads must be at least 1, got {num_threads}")
    return num_threads or len(os.sched_getaffinity(0))
