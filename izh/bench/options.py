"""Options of the benchmarks.

Owns: TimingOptions, which all of them take, the options of each, and the check of counts. Written as the groups of
`izh/config.py` are.
Must not know: argparse, torch.
"""

from dataclasses import dataclass
from typing import Any

from izh.bench.shapes import SHAPES
from izh.config import option
from izh.errors import OptionError


def at_least_one(options: Any, *names: str) -> None:
    """Raises OptionError for a count of none, in one of these fields or of the numbers in it."""
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value < 1:
                raise OptionError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """How long and how often."""

    prompt_tokens: int = option(128, "tokens in each prompt")
    output_tokens: int = option(64, "decode steps timed after the first token")
    repeats: int = option(3, "timed repeats of each engine, interleaved; the median is reported")
    json: str | None = option(None, "also write the figures, machine and date to this file; default: no file")


@dataclass(frozen=True, kw_only=True)
class ThroughputChoice:
    """What is measured."""

    batch: tuple[int, ...] = option((1, 8, 32), "requests at once; may be given many times", repeat=True)
    peer: bool = option(True, "measure transformers' generate beside izh")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(ThroughputChoice, TimingOptions):
    """All of `izh bench throughput`."""


@dataclass(frozen=True, kw_only=True)
class LoraChoice:
    """What is measured."""

    batch: int = option(32, "requests at once, spread over the adapters")
    adapters: tuple[int, ...] = option(
        (1, 8, 32, 64), "how many adapters the requests are spread over; may be given many times", repeat=True
    )
    shape: tuple[str, ...] = option(
        tuple(SHAPES), "rank and targets of the adapters; may be given many times", tuple(SHAPES), repeat=True
    )
    peer: bool = option(True, "measure PEFT's mixed batch beside izh")
    max_peer_adapters: int = option(8, "ask PEFT, which is slow with many, for up to this many adapters only")


@dataclass(frozen=True, kw_only=True)
class LoraOptions(LoraChoice, TimingOptions):
    """All of `izh bench lora`."""


@dataclass(frozen=True, kw_only=True)
class TurnsChoice:
    """What is measured."""

    adapters: tuple[int, ...] = option(
        (8, 16, 32), "how many adapters are wanted; may be given many times", repeat=True
    )
    slots: int = option(8, "adapters on the device at once")
    clients: int = option(32, "requests at once")
    requests: int = option(96, "requests of each repeat")
    shape: str = option("r16-all", "rank and targets of the adapters", tuple(SHAPES))


@dataclass(frozen=True, kw_only=True)
class TurnsOptions(TurnsChoice, TimingOptions):
    """All of `izh bench turns`."""


@dataclass(frozen=True, kw_only=True)
class ImagesOptions:
    """What is measured."""

    batch: tuple[int, ...] = option(
        (1, 4), "requests at once, each with an image of its own; may be given many times", repeat=True
    )
    width: int = option(2048, "pixels of each image from left to right")
    height: int = option(1536, "pixels of each image from top to bottom")
    peer: bool = option(True, "measure transformers beside izh")
    repeats: int = option(3, "timed repeats of each engine, interleaved; the median is reported")
    json: str | None = option(None, "also write the figures, machine and date to this file; default: no file")


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions:
    """All of `izh bench perplexity`."""

    window_tokens: int = option(512, "tokens that are scored by themselves, as if nothing stood before them")
    json: str | None = option(None, "also write the figures, machine and date to this file; default: no file")


@dataclass(frozen=True, kw_only=True)
class RepeatOptions:
    """How often, and where to."""

    repeats: int = option(5, "timed repeats of each engine, interleaved; the median is reported")
    json: str | None = option(None, "also write the figures, machine and date to this file; default: no file")


@dataclass(frozen=True, kw_only=True)
class EmbedBenchChoice:
    """What is measured."""

    embedder: str = option("demo", "directory of an embedding model, or 'demo' (all-MiniLM-L6-v2)")
    sentences: int = option(256, "sentences in one call, offline")
    requests: int = option(512, "requests of one sentence each, over HTTP")
    clients: int = option(64, "of them at once")
    http: bool = option(True, "measure over HTTP too, where a model generates beside the embedder")
    peer: bool = option(True, "measure sentence-transformers and Infinity beside izh")
    infinity: str | None = option(
        None,
        "Python interpreter of an environment with infinity-emb; default: that of 'izh bench peers --set-up infinity'; "
        "where there is none it is reported missing",
    )


@dataclass(frozen=True, kw_only=True)
class EmbedBenchOptions(EmbedBenchChoice, RepeatOptions):
    """All of `izh bench embed`."""


@dataclass(frozen=True, kw_only=True)
class RerankBenchChoice:
    """What is measured."""

    reranker: str | None = option(
        None, "directory of a cross-encoder; default: all-MiniLM-L6-v2 with a random head, as both libraries load it"
    )
    documents: int = option(100, "documents for one query")
    peer: bool = option(True, "measure sentence-transformers' CrossEncoder beside izh")
    num_threads: int | None = option(None, "CPU threads; default: all that this process may use")


@dataclass(frozen=True, kw_only=True)
class RerankBenchOptions(RerankBenchChoice, RepeatOptions):
    """All of `izh bench rerank`."""


@dataclass(frozen=True, kw_only=True)
class MixedOptions:
    """The load, and how long it lasts."""

    seconds: float = option(60.0, "how long the clients ask")
    chats: int = option(4, "clients that stream chats")
    adapted: int = option(4, "clients that stream chats through adapters")
    embeds: int = option(8, "clients that embed a sentence")
    reranks: int = option(2, "clients that rerank documents")
    adapters: int = option(4, "adapters, taken in turn")
    questions: int = option(8, "different questions of each kind")
    output_tokens: int = option(32, "tokens of an answer")
    embedder: str = option("demo", "directory of an embedding model, or 'demo' (all-MiniLM-L6-v2)")
    reranker: str = option("demo", "directory of a cross-encoder, or 'demo' (minilm-rerank)")
    json: str | None = option(None, "also write the figures, machine and date to this file; default: no file")
