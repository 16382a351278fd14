"""The report as Markdown, from what the JSON file holds.

Owns: the tables and the notes under them. Must not know: how figures are made.
Invariant: every contestant of a section is in its table or in its notes, with the reason.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from izh.bench.document import MAX_SPREAD

WRONG = 0.5
"""Below it the answers of a float32 engine are no matter of rounding: its figures are of other work."""

Json = Mapping[str, Any]

_RATES = ("prefill", "decode")
_HEAD = """# izh and its peers

Made by `izh bench peers` ([how](../README.md)): every engine on the same work, in turns. Rates in tokens/s."""


def report(sections: Json) -> str:
    """The whole file."""
    return "\n\n".join([_HEAD, *(_section(name, section) for name, section in sections.items())]) + "\n"


def columns(name: str, figures: Sequence[Json]) -> tuple[str, list[int]]:
    """What changes from column to column of a section that generates text: a field of its figures, and its values."""
    key = {"adapters": "adapters", "context": "prompt_tokens"}.get(name, "batch")
    return key, sorted({figure[key] for figure in figures})


def is_wrong(name: str, figure: Json) -> bool:
    """Whether an engine that computes what the reference computes gave other answers."""
    return name != "int8" and figure["agreement"] is not None and figure["agreement"] < WRONG


def _section(name: str, section: Json) -> str:
    title = section["title"]
    rows = _embeddings(section) if name == "embeddings" else _text(name, section)
    notes = [f"- {note}" for note in (*_left_out(section), *_marks(name, section))]
    parts = [f"## {title[0].upper()}{title[1:]}", _conditions(name, section), _table(rows), "\n".join(notes)]
    return "\n\n".join(part for part in parts if part)


def _text(name: str, section: Json) -> list[list[str]]:
    """A row for each engine; last, how izh stands to the best of the others."""
    figures = section["figures"]
    key, values = columns(name, figures)
    words = {"adapters": "adapters", "prompt_tokens": "tokens in", "batch": "at once"}
    rows = [
        ["engine", *(f"{rate}, {_counted(words[key], value)}" for rate in _RATES for value in values), "same tokens"],
    ]
    for engine in dict.fromkeys(figure["engine"] for figure in figures):
        own = {figure[key]: figure for figure in figures if figure["engine"] == engine}
        cells = [_cell(name, own.get(value), rate) for rate in _RATES for value in values]
        shares = [figure["agreement"] for figure in own.values() if figure["agreement"] is not None]
        rows.append([engine, *cells, f"{min(shares):.1%}" if shares else ""])
    by_column = {value: [each for each in figures if each[key] == value] for value in values}
    ratios = [_ratio(name, by_column[value], rate) for rate in _RATES for value in values]
    return [*rows, ["izh, times the best peer", *ratios, ""]]


def _embeddings(section: Json) -> list[list[str]]:
    rows = [["engine", "tokens/s", "texts/s", "cosine"]]
    for figure in section["figures"]:
        cells = [_cell("embeddings", figure, rate) for rate in ("tokens_per_s", "texts_per_s")]
        rows.append([figure["engine"], *cells, "" if figure["agreement"] is None else f"{figure['agreement']:.4f}"])
    ratios = [_ratio("embeddings", section["figures"], rate) for rate in ("tokens_per_s", "texts_per_s")]
    return [*rows, ["izh, times the best peer", *ratios, ""]]


def _cell(name: str, figure: Json | None, rate: str) -> str:
    if figure is None:
        return "-"
    if is_wrong(name, figure):
        return f"({figure[rate]:.0f})"
    return f"{figure[rate]:.0f}" + ("*" if figure["spread"] > MAX_SPREAD else "")


def _ratio(name: str, figures: Sequence[Json], rate: str) -> str:
    ours = [figure[rate] for figure in figures if figure["engine"].startswith("izh")]
    theirs = [each[rate] for each in figures if not each["engine"].startswith("izh") and not is_wrong(name, each)]
    return f"{max(ours) / max(theirs):.2f}" if ours and theirs else "-"


def _left_out(section: Json) -> list[str]:
    """One line for each engine and reason."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in section["left_out"]:
        fields = {"batch": "at once", "prompt_tokens": "tokens in", "adapters": "adapters"}
        where = ", ".join(_counted(text, each[key]) for key, text in fields.items() if each[key] is not None)
        lines.setdefault((each["engine"], each["why"]), []).append(where)
    return [
        f"{engine}" + (f" ({'; '.join(filter(None, places))})" if any(places) else "") + f": {why}"
        for (engine, why), places in lines.items()
    ]


def _marks(name: str, section: Json) -> list[str]:
    lines = []
    if any(figure["spread"] > MAX_SPREAD for figure in section["figures"]):
        lines.append(f"\\* disturbed: repeats differ by over {MAX_SPREAD:.0%}")
    if any(is_wrong(name, figure) for figure in section["figures"]):
        lines.append(f"( ) wrong answers: under {WRONG:.0%} of them are those of {section['reference']}")
    return lines


def _conditions(name: str, section: Json) -> str:
    options, machine = section["options"], section["machine"]
    work = f"{options['prompt_tokens']} tokens in, {options['output_tokens']} out" if name != "embeddings" else "texts"
    if name == "context":
        work = f"{section['figures'][0]['batch']} at once, {work.partition(', ')[2]}" if section["figures"] else work
    if name == "adapters":
        work += f", {max(options['batch'])} at once"
    model = options["embedder"] if name == "embeddings" else section["model"]
    versions = ", ".join(f"{name} {version}" for name, version in section["versions"].items())
    return (
        f"{model}, {work}. {machine['processor']}, {section['threads']} threads; median of {options['repeats']}; "
        f"{section['date']}; izh {section['izh']}, {versions}. Compared with {section['reference']}."
    )


def _counted(word: str, count: int) -> str:
    return f"{count} {word.removesuffix('s') if word == 'adapters' and count == 1 else word}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
