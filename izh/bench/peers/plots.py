"""The report's pictures: rates by batch size, by number of adapters, by length of the prompt.

Owns: PNG files. Must not know: how figures are made. matplotlib is of the `bench` extra, asked for before any work.
Invariant: an engine has the same colour in every picture; figures of wrong answers are not drawn.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from izh.bench.peers.markdown import columns, is_wrong
from izh.errors import OptionError

_PICTURES = {
    "batch": (("float32", "int8"), "requests at once"),
    "adapters": (("adapters",), "adapters in the batch"),
    "context": (("context",), "tokens in each prompt"),
}
_FAMILIES = ("izh", "transformers", "PEFT", "OpenVINO", "llama.cpp", "vLLM")


def check() -> None:
    """Raises OptionError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise OptionError("the report's plots need matplotlib: pip install 'izh[bench]'")


def write(sections: Mapping[str, Any], folder: Path) -> list[Path]:
    """The pictures whose sections were measured, one PNG file each."""
    written = []
    for picture, (names, label) in _PICTURES.items():
        lines = [line for name in names if name in sections for line in _lines(name, sections[name])]
        if lines:
            written.append(folder / f"{picture}.png")
            _draw(lines, label, written[-1])
    return written


def _lines(name: str, section: Mapping[str, Any]) -> list[tuple[str, str, dict[int, tuple[float, float]]]]:
    """(section, engine, {x: (prefill, decode)}) of every engine."""
    figures = [figure for figure in section["figures"] if not is_wrong(name, figure)]
    key, _values = columns(name, figures)
    engines = dict.fromkeys(figure["engine"] for figure in figures)
    return [
        (name, engine, {each[key]: (each["prefill"], each["decode"]) for each in figures if each["engine"] == engine})
        for engine in engines
        if name != "int8" or "int8" in engine or "Q8" in engine  # its float32 rows are in the other section's lines
    ]


def _draw(lines: Sequence[tuple[str, str, dict[int, tuple[float, float]]]], label: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for index, rate in enumerate(("prefill", "decode")):
        axes = figure.add_subplot(1, 2, index + 1)
        for section, engine, points in lines:
            axes.plot(
                [str(x) for x in points],
                [rates[index] for rates in points.values()],
                marker="o",
                linestyle="--" if section == "int8" else "-",
                linewidth=2.5 if engine.startswith("izh") else 1.5,
                color=_colour(engine),
                label=engine,
            )
        axes.set_title(f"{rate}, tokens/s")
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def _colour(engine: str) -> str:
    return f"C{next(i for i, family in enumerate(_FAMILIES) if engine.startswith(family))}"
