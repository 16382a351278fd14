"""The report's files from given figures, and the command from options to files with peers that are not there."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint

from izh.bench.peers import markdown, plots, report
from izh.bench.peers.measuring import EmbeddingFigure, LeftOut, TextFigure, Turns
from izh.bench.peers.options import PeersOptions
from izh.bench.peers.sections import SECTIONS, Group, groups_of
from izh.bench.timing import rates
from izh.config import EngineOptions
from izh.errors import OptionError


def text_figure(engine: str, batch: int = 1, second: float = 1.0, **more: Any) -> dict[str, Any]:
    """Prefill at 128 * batch / second, decode at 64 * batch / second."""
    wholes = [2 * second, 2 * second * (1 + more.pop("drift", 0.0))]
    known = {"prompt_tokens": 128, "adapters": 0, "agreement": 1.0} | more
    measured = asdict(rates(engine, batch, 128, 64, [second], wholes[:1])) | {"spread": wholes[1] / wholes[0] - 1}
    return asdict(TextFigure(**measured, **known))


def section(name: str, figures: list[dict[str, Any]], *left_out: LeftOut) -> dict[str, Any]:
    return {
        "date": "today",
        "izh": "0.1",
        "machine": {"processor": "cpu"},
        "model": "demo",
        "options": {"prompt_tokens": 128, "output_tokens": 64, "repeats": 3, "batch": [1, 8], "embedder": "demo"},
        "title": SECTIONS[name].title,
        "reference": SECTIONS[name].reference,
        "threads": 2,
        "versions": {"vllm": "9"},
        "figures": figures,
        "left_out": [asdict(each) for each in left_out],
    }


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, less the rulers."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_table_has_a_row_for_each_engine_and_a_column_for_each_batch() -> None:
    figures = [
        text_figure("izh", 1, 0.5),
        text_figure("transformers", 1, 1.0),
        text_figure("vLLM", 1, 2.0, agreement=0.9),
        text_figure("izh", 8, 0.8),
        text_figure("transformers", 8, 1.0, drift=0.5),
    ]
    text = markdown.report({"float32": section("float32", figures, LeftOut(engine="vLLM", why="slow", batch=8))})
    assert rows(text) == [
        ["engine", "prefill, 1 at once", "prefill, 8 at once", "decode, 1 at once", "decode, 8 at once", "same tokens"],
        ["izh", "256", "1280", "128", "640", "100.0%"],
        ["transformers", "128", "1024*", "64", "512*", "100.0%"],
        ["vLLM", "64", "-", "32", "-", "90.0%"],
        ["izh, times the best peer", "2.00", "1.25", "2.00", "1.25", ""],
    ]
    assert "- vLLM (8 at once): slow" in text
    assert "disturbed" in text
    assert (
        "128 tokens in, 64 out. cpu, 2 threads; median of 3; today; izh 0.1, vllm 9. Compared with transformers."
        in text
    )


def test_wrong_answers_are_shown_as_such_and_not_compared_or_drawn(tmp_path: Path) -> None:
    figures = [
        text_figure("izh", 8, 1.0, adapters=8),
        text_figure("PEFT", 8, 2.0, adapters=8),
        text_figure("OpenVINO GenAI", 8, 0.25, adapters=8, agreement=0.12),
    ]
    written = {"adapters": section("adapters", figures)}
    text = markdown.report(written)
    assert rows(text)[3] == ["OpenVINO GenAI", "(4096)", "(2048)", "12.0%"]
    assert rows(text)[-1] == ["izh, times the best peer", "2.00", "2.00", ""]
    assert "( ) wrong answers" in text
    assert [engine for _, engine, _ in plots._lines("adapters", written["adapters"])] == ["izh", "PEFT"]


def test_eight_bits_may_answer_otherwise() -> None:
    figures = [text_figure("izh int8", agreement=0.3), text_figure("llama.cpp Q8_0", second=2, agreement=0.2)]
    text = markdown.report({"int8": section("int8", figures)})
    assert "(" not in "".join(cell for row in rows(text)[1:] for cell in row)
    assert rows(text)[-1] == ["izh, times the best peer", "2.00", "2.00", ""]


def test_embeddings_have_a_table_of_their_own() -> None:
    known = {"spread": 0.0, "agreement": 0.99996}
    figures = [
        asdict(EmbeddingFigure(engine="izh", tokens_per_s=3000, texts_per_s=70, **known)),
        asdict(EmbeddingFigure(engine="Infinity", tokens_per_s=1000, texts_per_s=35, **known)),
    ]
    text = markdown.report({"embeddings": section("embeddings", figures)})
    assert rows(text) == [
        ["engine", "tokens/s", "texts/s", "cosine"],
        ["izh", "3000", "70", "1.0000"],
        ["Infinity", "1000", "35", "1.0000"],
        ["izh, times the best peer", "3.00", "2.00", ""],
    ]


def test_reasons_are_gathered() -> None:
    left_out = [LeftOut(engine="vLLM", why="slow", adapters=count) for count in (1, 8)]
    text = markdown.report({"adapters": section("adapters", [], *left_out)})
    assert "- vLLM (1 adapter; 8 adapters): slow" in text


def test_pictures_are_drawn_of_what_was_measured(tmp_path: Path) -> None:
    figures = [text_figure("izh", batch, adapters=count) for batch in (1, 8) for count in (0, 8)]
    written = {"float32": section("float32", figures), "adapters": section("adapters", figures)}
    assert plots.write(written, tmp_path) == [tmp_path / "batch.png", tmp_path / "adapters.png"]
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert plots.write({"embeddings": section("embeddings", [])}, tmp_path) == []


def test_only_the_8_bit_lines_of_the_8_bit_section_are_drawn() -> None:
    figures = [text_figure(engine) for engine in ("izh", "izh int8", "transformers", "llama.cpp Q8_0")]
    drawn = plots._lines("int8", section("int8", figures))
    assert [engine for _, engine, _ in drawn] == ["izh int8", "llama.cpp Q8_0"]


def test_groups_follow_the_options() -> None:
    options = PeersOptions(batch=(4, 2), adapters=(8, 8), context=(16, 64), prompt_tokens=32)
    assert groups_of("int8", options) == [Group(adapters=0, cells=((4, 32), (2, 32)))]
    assert groups_of("adapters", options) == [Group(adapters=n, cells=((4, 32),)) for n in (0, 8)]
    assert groups_of("context", options) == [Group(adapters=0, cells=((8, 16), (8, 64)))]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("peers"))


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections whose only figure is izh's."""

    def text(self: Turns, group: Group, entries: list[Any], *_: Any) -> None:
        assert [entry.label for entry in entries] == ["izh"]
        self.figures.append(TextFigure(**text_figure("izh", adapters=group.adapters, agreement=None)))

    monkeypatch.setattr(Turns, "text", text)


def options(tmp_path: Path, **more: Any) -> PeersOptions:
    known = {"environments": str(tmp_path / "none"), "results": str(tmp_path / "results"), "adapters": (1,)}
    return PeersOptions(**known | more)


@pytest.mark.usefixtures("without_measuring")
def test_a_missing_peer_is_named_and_other_sections_stay(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = EngineOptions(model=str(tiny_model))
    assert (
        report.report(engine, options(tmp_path, only=("float32",), context=(8,), prompt_tokens=8, output_tokens=4)) == 0
    )
    text = (tmp_path / "results" / "peers.md").read_text()
    assert text in capsys.readouterr().out
    assert "- vLLM: missing: izh bench peers --set-up vllm" in text
    assert "- llama.cpp F32: missing: izh bench peers --set-up llamacpp (compiles for up to half an hour)" in text
    only_peft = options(tmp_path, only=("adapters",), peers=("peft",), context=(8,), prompt_tokens=8, output_tokens=4)
    report.report(engine, only_peft)
    kept = (tmp_path / "results" / "peers.json").read_text()
    assert str(tmp_path / "none") not in kept, "a machine's own paths"
    written = json.loads(kept)
    assert list(written) == ["float32", "adapters"]
    assert written["adapters"]["left_out"] == [
        asdict(LeftOut(engine="PEFT", why="missing: izh bench peers --set-up peft")),
        asdict(LeftOut(engine="llama.cpp", why="never puts two adapters into one batch")),
    ]
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "peers.md",
        "peers.json",
        "batch.png",
        "adapters.png",
    }


def test_izh_and_a_peer_are_measured_for_real(tiny_model: Path, tmp_path: Path) -> None:
    python = tmp_path / "none" / "peft" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    short = {"batch": (2,), "adapters": (2,), "context": (8,), "prompt_tokens": 8, "output_tokens": 48, "repeats": 1}
    peers = {"peers": ("peft",), "only": ("adapters",), "json": str(tmp_path / "copy.json")}
    assert report.report(EngineOptions(model=str(tiny_model)), options(tmp_path, **short, **peers)) == 0
    written = json.loads((tmp_path / "copy.json").read_text())["adapters"]
    assert [(each["engine"], each["adapters"], each["agreement"]) for each in written["figures"]] == [
        ("izh", 0, 1),
        ("PEFT", 0, 1),
        ("izh", 2, 1),
        ("PEFT", 2, 1),
    ]
    assert list(written["versions"]) == ["peft"]


def test_set_up_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(report.Environments, "set_up", lambda self, name: asked.append(name))
    assert report.report(EngineOptions(model="nowhere"), options(tmp_path, set_up=("vllm", "peft", "vllm"))) == 0
    assert asked == ["vllm", "peft"]
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        ({}, {"context": (0,)}, "--context must be at least 1, got 0"),
        ({}, {"adapters": (-1,)}, "--adapters must be at least 1"),
        ({}, {"limit_s": 0}, "--limit-s must be at least 1"),
        ({}, {"batch": (65,)}, "--batch 65 exceeds --max-num-seqs 64"),
        ({"device": "cuda"}, {}, "on the CPU"),
        ({"dtype": "bf16"}, {}, "leave out --device, --dtype"),
        ({"quantization": "int8"}, {}, "--quantization is not for this command"),
        ({"max_loras": 3}, {}, "--max-loras is not for this command"),
    ],
)
def test_what_cannot_be_measured_is_refused(engine: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        report.check(EngineOptions(**engine), PeersOptions(**more))


@pytest.mark.usefixtures("without_measuring")
def test_a_prompt_beyond_the_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--context 100000"):
        report.report(EngineOptions(model=str(tiny_model)), options(tmp_path, context=(100_000,)))
