"""Options of terminal commands that are no engine options.

Owns: AnswerOptions (`run`, `chat`), EmbedOptions, RerankOptions. Must not know: argparse, or how they are used. Written
as the groups of `izh/config.py` are.
"""

from dataclasses import dataclass

from izh.config import QUANTIZATIONS, option


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
class ReadingOptions:
    """How texts are read and computed."""

    truncate_prompt_tokens: int | None = option(
        None, "cut what is longer to so many tokens, -1: to what the model takes; default: it is refused"
    )
    num_threads: int | None = option(None, "CPU threads; default: all that this process may use")
    quantization: str | None = option(
        None,
        "hold the weights in fewer bits: vectors within a thousandth with int8, further off with int4; "
        "default: as they are",
        QUANTIZATIONS,
    )


@dataclass(frozen=True, kw_only=True)
class EmbedChoice:
    """How texts become vectors."""

    embedder: str = option("demo", "directory of an embedding model, or 'demo' (all-MiniLM-L6-v2)")
    out: str | None = option(
        None, "file to write: NAME.npy holds a float32 array, any other JSON lines; default: JSON lines on stdout"
    )
    prompt_name: str | None = option(
        None, "which of the model's prompts goes before each text; default: the one that the model names"
    )
    dimensions: int | None = option(None, "cut vectors of a model trained for that; default: they stay whole")


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(EmbedChoice, ReadingOptions):
    """All of `izh embed`."""


@dataclass(frozen=True, kw_only=True)
class RerankChoice:
    """How texts are put in order."""

    reranker: str = option("demo", "directory of a cross-encoder, or 'demo' (minilm-rerank)")
    top_n: int | None = option(None, "print so many of the best; default: all")
    raw_scores: bool = option(False, "leave out the model's last activation, as the sigmoid")
    json: bool = option(False, "JSON lines (index, score, document) instead of a table")


@dataclass(frozen=True, kw_only=True)
class RerankOptions(RerankChoice, ReadingOptions):
    """All of `izh rerank`."""
