"""Options of `izh bench peers`. Written as the groups of `izh/config.py` are. Must not know: argparse, torch."""

from dataclasses import dataclass

from izh.bench.options import TimingOptions
from izh.config import option

SECTION_NAMES = ("float32", "int8", "adapters", "context", "embeddings")
PEER_NAMES = ("transformers", "peft", "openvino", "llamacpp", "vllm", "sentence-transformers", "infinity")


@dataclass(frozen=True, kw_only=True)
class PeersChoice:
    """What is measured, and beside whom."""

    set_up: tuple[str, ...] = option(
        (), "install this peer in an environment of its own, and stop; may be given many times", PEER_NAMES, repeat=True
    )
    peers: tuple[str, ...] = option(
        PEER_NAMES, "measure beside these only; may be given many times", PEER_NAMES, repeat=True
    )
    only: tuple[str, ...] = option(
        SECTION_NAMES,
        "measure these sections of the report, and keep the others as they are; may be given many times",
        SECTION_NAMES,
        repeat=True,
    )
    batch: tuple[int, ...] = option((1, 8, 32), "requests at once; may be given many times", repeat=True)
    adapters: tuple[int, ...] = option(
        (1, 8), "how many adapters the largest batch is spread over; may be given many times", repeat=True
    )
    context: tuple[int, ...] = option(
        (128, 512, 1024), "tokens in each prompt where prompts grow; may be given many times", repeat=True
    )
    embedder: str = option("demo", "directory of an embedding model, or 'demo' (all-MiniLM-L6-v2)")
    environments: str | None = option(
        None, "directory of the peers' virtual environments; default: peers, in the directory of izh's cache"
    )
    limit_s: int = option(300, "seconds in which a peer must load, or answer a batch, to be measured")
    results: str = option("benchmarks/results", "directory of the report: peers.md, peers.json and plots")


@dataclass(frozen=True, kw_only=True)
class PeersOptions(PeersChoice, TimingOptions):
    """All of `izh bench peers`."""
