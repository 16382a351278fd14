"""What every benchmark writes down: its figures with all that a reader needs to judge them.

Owns: the fields of the JSON file, and the caption that says the same under a table.
Must not know: what the figures mean.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from izh.bench.machine import describe
from izh.bench.options import TimingOptions
from izh.bench.timing import Rates
from izh.config import EngineOptions
from izh.version import __version__


def document(engine: EngineOptions, model: str, options: TimingOptions, figures: Sequence[Rates]) -> dict[str, Any]:
    """The report, ready for JSON. `engine` must name its device."""
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


def caption(document: dict[str, Any]) -> str:
    """On which machine, how and when."""
    machine = document["machine"]
    return (
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}; "
        f"median of {document['options']['repeats']}; {document['date']}"
    )


def write(document: dict[str, Any], path: str | None) -> None:
    """To a file, if there is to be one."""
    if path is not None:
        Path(path).write_text(json.dumps(document, indent=2) + "\n")
