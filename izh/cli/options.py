"""Options of terminal commands that are no engine options.

Owns: AnswerOptions (`run`, `chat`). Must not know: argparse, or how they are used. Written as the groups of
`izh/config.py` are.
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
