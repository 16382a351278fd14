"""Options of the benchmarks.

Owns: ThroughputOptions. Must not know: argparse, torch. Written as the groups of `izh/config.py` are.
"""

from dataclasses import dataclass

from izh.config import option


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """What is measured."""

    batch: tuple[int, ...] = option((1, 8, 32), "requests at once; may be given many times", repeat=True)
    prompt_tokens: int = option(128, "tokens in each prompt")
    output_tokens: int = option(64, "decode steps timed after the first token")
    repeats: int = option(3, "timed repeats of each engine, interleaved; the median is reported")
    peer: bool = option(True, "measure transformers' generate beside izh")
    json: str | None = option(None, "also write the figures, machine and date to this file; default: no file")
