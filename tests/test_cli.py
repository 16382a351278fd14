"""The command line as a whole: words in, an exit status and lines out."""

import subprocess
import sys
from pathlib import Path

import pytest

import izh
from izh.cli import commands, main
from izh.cli.parser import parse
from izh.errors import OptionError

ROOT = Path(__file__).parents[1]


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line on stderr of a line that must be refused."""
    with pytest.raises(SystemExit) as exit_:
        parse(words)
    assert exit_.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "closest"),
    [
        (("serve", "--kv-cache", "4"), "--kv-cache-gb"),
        (("serve", "--max-model-length=100"), "--max-model-len"),
        (("run", "hello", "--temprature", "1"), "--temperature"),
        (("bench", "throughput", "--batches", "1"), "--batch"),
    ],
)
def test_an_unknown_option_is_an_error_with_the_closest_match(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], closest: str
) -> None:
    message = error_of(capsys, *words)
    assert "unknown option" in message
    assert message.endswith(f"did you mean {closest}?")


def test_an_option_like_no_other_points_to_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "serve", "--qqqqqqqq").endswith("unknown option --qqqqqqqq; see --help")


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """What an abbreviation means would change with every new option."""
    assert "unknown option --rev" in error_of(capsys, "serve", "--rev", "main")


def test_one_argument_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "serve", "demo", "more").endswith("unexpected argument 'more'")


def test_no_command_and_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in error_of(capsys)
    assert "invalid choice: 'sreve'" in error_of(capsys, "sreve")


@pytest.mark.parametrize(
    "words",
    [("serve", "DIR"), ("serve", "--model", "DIR"), ("serve", "--model-dir", "DIR"), ("serve", "--model-dir=DIR")],
)
def test_ways_to_name_the_model(words: tuple[str, ...]) -> None:
    assert parse(words).model == "DIR"


def test_the_model_is_demo_unless_named() -> None:
    assert parse(["serve"]).model == "demo"
    assert parse(["run", "hello"]).model == "demo"
    assert parse(["run", "hello", "DIR"]).model == "DIR"


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two models" in error_of(capsys, "serve", "A", "--model", "B")
    assert parse(["serve", "A", "--model", "A"]).model == "A"


def test_an_error_of_ours_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_arguments: object) -> int:
        raise OptionError("--block-size must be at least 1, got 0")

    monkeypatch.setattr(commands, "serve", fail)
    assert main(["serve"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "izh: --block-size must be at least 1, got 0\n"
    assert captured.out == ""


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "serve", interrupt)
    assert main(["serve"]) == 130


def test_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["fetch", str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_fetch_says_where_the_model_lies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["fetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"izh {izh.__version__} ")
    assert "torch 2" in out


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As in `izh embed FILE | head`."""
    started = subprocess.Popen(
        [sys.executable, "-m", "izh", "version"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    started.stdout.close()
    assert started.stderr is not None
    with started, started.stderr:
        assert started.stderr.read() == ""
    assert started.returncode == 141


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (("-m", "izh", "run"), "izh run PROMPT [MODEL] [options]"),
        (("serve.py",), "izh serve [MODEL] [options]"),
        (("run.py", "features"), "izh features [MODEL] [options]"),
    ],
)
def test_the_ways_in(command: tuple[str, ...], usage: str) -> None:
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"usage: {usage}"
