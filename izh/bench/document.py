"""What every benchmark writes down: its figures with all that a reader needs to judge them.

Owns: the fields of the JSON file, the caption that says the same under a table, the mark of a disturbed figure.
Must not know: what the figures mean.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from izh.bench.machine import describe
from izh.config import EngineOptions
from izh.version import __version__

MAX_SPREAD = 0.1
"""Above it a figure is marked: repeats do the same work, so such a difference is the machine's doing."""


class Measured(Protocol):
    """A figure. `spread` is how much longer the slowest repeat took than the fastest, as a share of the fastest."""

    @property
    def engine(self) -> str: ...

    @property
    def spread(self) -> float: ...


def document(engine: EngineOptions, model: str, options: Any, figures: Sequence[Any]) -> dict[str, Any]:
    """The report, ready for JSON. `engine` must name its device; options and figures are dataclasses."""
    assert engine.device is not None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "izh": __version__,
        "machine": describe(engine.device),
        "model": model,
        "device": engine.device,
        "dtype": engine.dtype,
        "options": {key: value for key, value in asdict(options).items() if key != "json"},
        "figures": [asdict(figure) for figure in figures],
    }


def caption(figures: Sequence[Measured], document: dict[str, Any]) -> str:
    """On which machine, how and when; and what a mark means, if there is one."""
    machine = document["machine"]
    about = (
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}; "
        f"median of {document['options']['repeats']}; {document['date']}"
    )
    if all(figure.spread <= MAX_SPREAD for figure in figures):
        return about
    return f"* disturbed: repeats differ by over {MAX_SPREAD:.0%}; measure again\n{about}"


def label(figure: Measured) -> str:
    """The engine's name, marked when the machine disturbed it."""
    return figure.engine + ("*" if figure.spread > MAX_SPREAD else "")


def write(document: dict[str, Any], path: str | None) -> None:
    """To a file, if there is to be one."""
    if path is not None:
        Path(path).write_text(json.dumps(document, indent=2) + "\n")
