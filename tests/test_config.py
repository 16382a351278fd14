"""The option groups, and their way through the command line and back."""

import argparse
from dataclasses import FrozenInstanceError, dataclass, fields

import pytest

from izh.cli.flags import add_flags, take
from izh.config import EngineOptions, ServerOptions, option, option_fields


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One field of every kind that an option may have."""

    text: str = option("a", "a text, 100% of it")
    maybe_text: str | None = option(None, "default: none")
    count: int = option(3, "a count")
    maybe_count: int | None = option(None, "default: none")
    share: float = option(0.5, "a share")
    is_on: bool = option(True, "a switch")
    is_off: bool = option(False, "another")
    colour: str | None = option(None, "default: none", ("red", "blue"))
    words: tuple[str, ...] = option((), "words", repeat=True)
    sizes: tuple[int, ...] = option((1, 8), "sizes", repeat=True)


def parsed(*words: str) -> Sample:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    return take(Sample, parser.parse_args(words))


def test_no_flags_give_the_defaults() -> None:
    assert parsed() == Sample()


@pytest.mark.parametrize("cls", [EngineOptions, ServerOptions])
def test_no_flags_give_the_defaults_of_the_real_groups(cls: type) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, cls)
    assert take(cls, parser.parse_args([])) == cls()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--text", "b"], Sample(text="b")),
        (["--maybe-text=b"], Sample(maybe_text="b")),
        (["--count", "-4"], Sample(count=-4)),
        (["--maybe-count", "4"], Sample(maybe_count=4)),
        (["--share", "1"], Sample(share=1.0)),
        (["--no-is-on", "--is-off"], Sample(is_on=False, is_off=True)),
        (["--colour", "red"], Sample(colour="red")),
        (["--words", "x", "--words", "y"], Sample(words=("x", "y"))),
        (["--sizes", "2"], Sample(sizes=(2,))),
        (["--sizes", "2", "--sizes", "1"], Sample(sizes=(2, 1))),
    ],
)
def test_a_flag_sets_its_field(words: list[str], expected: Sample) -> None:
    assert parsed(*words) == expected


def test_values_have_the_declared_type() -> None:
    assert type(parsed("--share", "1").share) is float
    assert type(parsed("--maybe-count", "1").maybe_count) is int


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "x"], "argument --count: invalid int value: 'x'"),
        (["--colour", "green"], "invalid choice: 'green' (choose from"),
        (["--maybe-text"], "expected one argument"),
    ],
)
def test_a_wrong_value_names_the_flag(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        parsed(*words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_help_shows_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    text = " ".join(parser.format_help().split())
    assert "One field of every kind that an option may have:" in text
    assert "a text, 100% of it (default: a)" in text
    assert "a switch (default: on)" in text
    assert "sizes (default: 1, 8)" in text
    assert "default: none (default" not in text


def test_groups_are_frozen_and_keyword_only() -> None:
    for cls in (EngineOptions, ServerOptions):
        with pytest.raises(TypeError):
            cls("demo")
        with pytest.raises(FrozenInstanceError):
            cls().__setattr__(fields(cls)[0].name, "x")


def test_no_two_options_share_a_name() -> None:
    """`izh serve` takes both groups through one namespace."""
    names = [field.name for field in option_fields(EngineOptions, ServerOptions)]
    assert len(names) == len(set(names))
