"""Options of commands that are no engine or server options.

Owns: AnswerOptions (`run`, `chat`), ThroughputOptions (`bench throughput`).
Must not know: argparse, or how they are used. Written as the groups of `izh/config.py` are.
"""

from dataclasses import dataclass

from izh.config import option


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How an answer is made."""

    system: str | None = option(None, "system message; default: the chat template's own")
    max_tokens: int = option(512, "longest answer, in tokens")
    temperature: float = option(0.7, "randomness; 0 is greedy")
    top_p: float = option(0.95, "sample from the likeliest tokens that hold this share of the probability")
    top_k: int = option(0, "sample from this many likeliest tokens; 0 is all")
    seed: int | None = option(None, "draw the same answer every time; default: a new one each time")
    stop: tuple[str, ...] = option((), "end the answer at this text; may be given many times", repeat=True)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """What is measured."""

    batch: tuple[int, ...] = option((1, 8, 32), "requests at once; may be given many times", repeat=True)
    prompt_tokens: int = option(128, "tokens in each prompt")
    output_tokens: int = option(64, "decode steps timed after the first token")
    repeats: int = option(3, "timed repeats of each engine, interleaved; the median is reported")
    peer: bool = option(True, "measure transformers' generate beside izh")
    json: str | None = option(None, "also write the figures, machine and date to this file; default: no file")
