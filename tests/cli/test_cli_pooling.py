"""`izh embed` and `izh rerank` on small random models: what goes in, what comes out, and what is wrong with a line."""

import io
import json
import sys
from pathlib import Path

import encoders_made
import numpy as np
import pytest

from izh import LLM
from izh.cli import main

TEXTS = ["the quick brown fox", "a query, and a document", "für Äpfel 日本"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lines")
    encoders_made.save(root / "embedder", "bert")
    encoders_made.save(root / "reranker", "roberta", num_labels=1)
    return root


@pytest.fixture(scope="module")
def llm(folders: Path) -> LLM:
    return LLM(None, embedder=folders / "embedder", reranker=folders / "reranker", quiet=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


def test_json_lines_on_standard_output(capsys: pytest.CaptureFixture[str], folders: Path, llm: LLM, file: Path) -> None:
    assert main(["embed", str(file), "--embedder", str(folders / "embedder")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert np.array_equal(np.array([line["embedding"] for line in lines], dtype=np.float32), llm.embed(TEXTS))


def test_8_bits(capsys: pytest.CaptureFixture[str], folders: Path, file: Path) -> None:
    where = ["--embedder", str(folders / "embedder")], ["--reranker", str(folders / "reranker")]
    assert main(["embed", str(file), *where[0], "--quantization", "int8"]) == 0
    printed = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    assert main(["rerank", str(file), *where[1], "--query", "fox", "--json", "--quantization", "int8"]) == 0
    scores = [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()]
    llm = LLM(None, embedder=folders / "embedder", reranker=folders / "reranker", quiet=True, quantization="int8")
    assert np.array_equal(np.array(printed, dtype=np.float32), llm.embed(TEXTS))
    assert scores == [each.score for each in llm.rerank("fox", TEXTS)]


def test_files_of_both_kinds(capsys: pytest.CaptureFixture[str], folders: Path, llm: LLM, file: Path) -> None:
    words = ("embed", str(file), "--embedder", str(folders / "embedder"), "--out")
    array, text = file.with_name("x.npy"), file.with_name("x.jsonl")
    assert main([*words, str(array)]) == main([*words, str(text)]) == 0
    assert capsys.readouterr().out == ""
    assert np.array_equal(np.load(array), llm.embed(TEXTS))
    assert len(text.read_text().splitlines()) == 3


def test_the_best_line_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folders: Path, llm: LLM
) -> None:
    typed = io.TextIOWrapper(io.BytesIO("\r\n".join(TEXTS).encode()))  # as files from Windows, without a last newline
    monkeypatch.setattr(sys, "stdin", typed)
    ranked = llm.rerank("fox", TEXTS)
    assert main(["rerank", "--query", "fox", "--json", "--top-n", "2", "--reranker", str(folders / "reranker")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"index": e.index, "score": e.score, "document": e.document} for e in ranked[:2]]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], folders: Path, llm: LLM, file: Path) -> None:
    assert main(["rerank", "--query", "fox", str(file), "--reranker", str(folders / "reranker")]) == 0
    rows = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [str(place), f"{each.score:.4f}", str(each.index + 1), each.document]
        for place, each in enumerate(llm.rerank("fox", TEXTS), 1)
    ]


def test_options_reach_the_model(capsys: pytest.CaptureFixture[str], folders: Path, file: Path) -> None:
    file.write_text("fox " * 100)
    words = ("embed", str(file), "--embedder", str(folders / "embedder"), "--truncate-prompt-tokens")
    assert main([*words, "-1"]) == 0
    whole = capsys.readouterr().out
    assert main([*words, "5"]) == 0
    assert capsys.readouterr().out != whole
    assert main(["embed", str(file), "--embedder", str(folders / "embedder"), "--dimensions", "8"]) == 2
    assert "dimensions: this model was not trained to be cut" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"fox\n\ndog\n", "texts.txt, line 2, has no text; remove the line"),
        (b"fox\n   \n", "texts.txt, line 2, has no text"),
        (b"", "texts.txt is empty; give one text a line"),
        (b"fox\n" + b"fox " * 100 + b"\n", "texts.txt, line 2, has 102 tokens; this model takes at most 60"),
        (b"fox\ncaf\xe9\n", "texts.txt, line 2, is not UTF-8 (byte 4)"),
    ],
)
@pytest.mark.parametrize("command", ["embed", "rerank"])
def test_a_line_that_cannot_be_is_named(
    capsys: pytest.CaptureFixture[str], folders: Path, file: Path, command: str, content: bytes, complaint: str
) -> None:
    file.write_bytes(content)
    if command == "embed":
        words = ["embed", str(file), "--embedder", str(folders / "embedder")]
    else:
        words = ["rerank", str(file), "--query", "fox", "--reranker", str(folders / "reranker")]
        complaint = complaint.replace("102 tokens", "105 tokens")  # with the query, and the mark between
    assert main(words) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""


def test_what_cannot_be_read_or_written(capsys: pytest.CaptureFixture[str], folders: Path, file: Path) -> None:
    assert main(["embed", str(file) + ".gone"]) == 2
    assert "texts.txt.gone: No such file or directory" in capsys.readouterr().err
    assert main(["embed", str(file), "--out", str(file.parent / "no" / "x.npy")]) == 2
    assert f"there is no directory {file.parent / 'no'}" in capsys.readouterr().err
    assert main(["embed", str(file), "--embedder", str(folders / "embedder"), "--out", str(file.parent)]) == 2
    assert "cannot write: Is a directory" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_text(capsys: pytest.CaptureFixture[str], folders: Path, file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbffox\nfox\n")
    assert main(["embed", str(file), "--embedder", str(folders / "embedder")]) == 0
    first, second = (json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines())
    assert first == second
