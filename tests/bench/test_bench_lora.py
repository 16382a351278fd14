"""`izh bench lora`: a real run on a small model, what is refused, and what the table says."""

import json
import tempfile
from pathlib import Path
from typing import Any

import clocked
import pytest
import tiny_checkpoint

from izh.bench import lora
from izh.bench.lora import Figure, check, check_memory, figures, table, why_no_peer
from izh.bench.options import LoraOptions
from izh.bench.timing import rates
from izh.cli import main
from izh.config import EngineOptions
from izh.errors import OptionError
from izh.model.load import load_spec
from izh.model.source import resolve

DOCUMENT = {
    "model": "demo",
    "dtype": "fp32",
    "machine": {"processor": "cpu", "threads": 2, "torch": "2"},
    "options": {"batch": 4, "prompt_tokens": 100, "output_tokens": 10, "repeats": 3},
    "date": "today",
    "peer_left_out": {64: "above --max-peer-adapters 8"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint.save_llama(tmp_path_factory.mktemp("bench-lora")))


def group(count: int, different: int | None = None, peer: bool = True, unused: bool = False) -> list[Figure]:
    """Prefill 400 (base), 380 (mixed), 100 (PEFT) tokens/s; decode 40, 36, 9."""
    measured: dict[lora.Use, Any] = {
        "base": (rates("izh base", 4, 100, 10, [1.0], [2.0]), [[1, 2, 3, 4]]),
        "mixed": (rates(f"izh {count} mixed", 4, 100, 10, [1 / 0.95], [1 / 0.95 + 1 / 0.9]), [[1, 1, 1, 1]]),
    }
    if unused:
        measured["unused"] = (rates(f"izh {count} unused", 4, 100, 10, [1.0], [2.0]), [[1, 2, 3, 9]])
    if peer:
        measured["peer"] = (rates(f"PEFT {count} mixed", 4, 100, 10, [4.0], [4.0 + 40 / 9]), [[1, 1, 9, 9]])
    return figures(measured, "r16-all", count, count + 1 if different is None else different)


def test_answers_are_compared_with_those_that_must_be_equal() -> None:
    by_use = {figure.use: figure for figure in group(8, unused=True)}
    assert by_use["mixed"].agreement == 0.5
    assert by_use["unused"].agreement == 0.75
    assert (by_use["base"].agreement, by_use["peer"].agreement) == (None, None)
    assert {figure.agreement for figure in group(8, peer=False)} == {None}


def test_the_table_shows_what_the_aims_ask_for() -> None:
    cells, text = clocked.shown(table(group(8) + group(64, peer=False, unused=True), DOCUMENT))
    assert cells == [
        ["izh base", "400", "", "", "40", "", "", ""],
        ["izh 8 mixed", "380", "95.0%", "3.80x", "36", "90.0%", "4.00x", "50.0%"],
        ["PEFT 8 mixed", "100", "", "", "9", "", "", ""],
        ["izh base", "400", "", "", "40", "", "", ""],
        ["izh 64 mixed", "380", "95.0%", "", "36", "90.0%", "", ""],
        ["izh 64 unused", "400", "100.0%", "", "40", "100.0%", "", "75.0%"],
        ["PEFT 64 mixed", "-", "-", "-", "-", "-", "-", "-"],
    ]
    assert "demo fp32, rank 16 on all seven projections, tokens/s" in text
    assert "batch 4, 100 tokens in, 10 out" in text
    assert "PEFT left out with 64 adapters (above --max-peer-adapters 8)" in text
    assert "all adapters and the base gave different answers" in text
    assert "median of 3; today" in text
    assert "disturbed" not in text


def test_a_disturbed_figure_is_marked() -> None:
    base = rates("izh base", 4, 100, 10, [1.0, 1.05], [2.0, 2.1])
    mixed = rates("izh 8 mixed", 4, 100, 10, [1.0, 1.0, 1.2], [2.0, 2.0, 2.0])
    found = figures({"base": (base, []), "mixed": (mixed, [])}, "r16-all", 8, 9)
    cells, text = clocked.shown(table(found, DOCUMENT))
    assert [row[0] for row in cells[:2]] == ["izh base", "izh 8 mixed*"]
    assert "* disturbed: repeats differ by over 10%; measure again" in text


def test_the_table_fits_a_pipe() -> None:
    cells, text = clocked.shown(table(group(8) + group(64, peer=False, unused=True), DOCUMENT), width=80)
    assert [row[0] for row in cells][-1] == "PEFT 64 mixed"
    assert len(cells) == 7
    assert "…" not in text


def test_adapters_that_do_nothing_are_told() -> None:
    _cells, text = clocked.shown(table(group(8, different=7), DOCUMENT))
    assert "8 adapters and the base gave only 7 different answers to one prompt" in text
    assert "all adapters" not in text


@pytest.mark.parametrize(
    ("options", "count", "reason"),
    [
        (LoraOptions(), 8, None),
        (LoraOptions(), 9, "above --max-peer-adapters 8"),
        (LoraOptions(max_peer_adapters=64), 9, None),
        (LoraOptions(peer=False), 1, "--no-peer"),
    ],
)
def test_which_counts_peft_is_asked_for(options: LoraOptions, count: int, reason: str | None) -> None:
    assert why_no_peer(options, count) == reason


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ({}, {"adapters": (8, 0)}, "--adapters must be at least 1, got 0"),
        ({}, {"batch": 0}, "--batch must be at least 1, got 0"),
        ({}, {"batch": 65}, "--batch 65 exceeds --max-num-seqs 64"),
        ({}, {"repeats": 0}, "--repeats must be at least 1"),
        ({}, {"max_peer_adapters": 0}, "--max-peer-adapters must be at least 1, got 0"),
        ({"lora": ("a=b",)}, {}, "--lora is not for this command"),
        ({"max_loras": 9}, {}, "--max-loras is not for this command.*--adapters"),
        ({"max_lora_rank": 9}, {}, "--max-lora-rank is not for this command.*--shape"),
    ],
)
def test_what_cannot_be_measured_is_refused(engine: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check(EngineOptions(**engine), LoraOptions(**options))


def test_more_than_the_memory_holds_is_refused(checkpoint: str) -> None:
    spec = load_spec(resolve(checkpoint))
    engine = EngineOptions(device="cpu", dtype="fp32", kv_cache_gb=0.01)
    check_memory(spec, engine, LoraOptions(), left_out=())
    many = LoraOptions(adapters=(1, 10_000_000))
    with pytest.raises(OptionError, match=r"10000000 adapters of rank 16 and 3 copies .* lower --adapters, or use"):
        check_memory(spec, engine, many, left_out=())
    with pytest.raises(OptionError, match=r"2 copies of the model .* are free; lower --adapters$"):
        check_memory(spec, engine, many, left_out=(10_000_000,))


RUN = ("--batch", "4", "--adapters", "2", "--adapters", "6", "--prompt-tokens", "20", "--output-tokens", "12")
RUN += ("--repeats", "2", "--max-peer-adapters", "2", "--shape", "r16-all", "--device", "cpu")


def test_a_run(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    file = tmp_path / "figures.json"
    assert main(["bench", "lora", checkpoint, *RUN, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    found = written["figures"]
    assert [(figure["adapters"], figure["use"]) for figure in found] == [
        (2, "base"),
        (2, "mixed"),
        (2, "peer"),
        (6, "base"),
        (6, "mixed"),
        (6, "unused"),
    ]
    by_use = {(figure["adapters"], figure["use"]): figure for figure in found}
    assert by_use[2, "mixed"]["agreement"] == 1.0
    assert by_use[6, "unused"]["agreement"] == 1.0
    assert [by_use[count, "mixed"]["different"] for count in (2, 6)] == [3, 7]
    for figure in found:
        assert figure["prefill"] == pytest.approx(4 * 20 / figure["first_s"])
        assert figure["decode"] == pytest.approx(4 * 12 / (figure["whole_s"] - figure["first_s"]))
    assert written["peer_left_out"] == {"6": "above --max-peer-adapters 2"}
    assert "PEFT left out with 6 adapters (above --max-peer-adapters 2)" in capsys.readouterr().out
    assert list(scratch.iterdir()) == []


def test_without_peft_the_own_figures_are_there(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    assert main(["bench", "lora", checkpoint, *RUN]) == 0
    out = capsys.readouterr().out
    assert "izh 6 unused" in out
    assert "PEFT left out with 2, 6 adapters (not installed: pip install peft)" in out
