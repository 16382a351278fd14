"""Each option has one flag and one help line, and nothing but its dataclass says so."""

import argparse
import inspect
from dataclasses import fields, is_dataclass

import pytest

import izh.bench.options
import izh.bench.peers.options
import izh.cli.options
import izh.config
from izh.cli.flags import flag_of, groups_of
from izh.cli.parser import build_parser

GROUPS = [
    cls
    for module in (izh.config, izh.cli.options, izh.bench.options, izh.bench.peers.options)
    for _, cls in inspect.getmembers(module, is_dataclass)
    if isinstance(cls, type) and cls.__module__ == module.__name__
]


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command that can be run, by its full name."""
    found: dict[str, argparse.ArgumentParser] = {}
    pending = [build_parser()]
    while pending:
        parser = pending.pop()
        subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        pending += [child for action in subs for child in action.choices.values()]
        if not subs:
            found[parser.prog] = parser
    return found


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {flag: action for action in parser._actions for flag in action.option_strings}


def test_commands() -> None:
    benches = {
        "bench embed",
        "bench rerank",
        "bench mixed",
        "bench throughput",
        "bench lora",
        "bench turns",
        "bench images",
        "bench perplexity",
        "bench peers",
    }
    expected = {"serve", "run", "chat", "embed", "rerank", "features", "fetch", "version"} | benches
    assert set(commands()) == {f"izh {name}" for name in expected}


@pytest.mark.parametrize("group", GROUPS, ids=lambda cls: cls.__name__)
def test_each_option_has_a_help_line(group: type) -> None:
    for field in fields(group):
        text = field.metadata.get("help", "")
        assert text, f"{group.__name__}.{field.name} has no help line"
        if field.default is None:
            assert "default:" in text, f"{group.__name__}.{field.name} does not say what happens without it"


@pytest.mark.parametrize("group", GROUPS, ids=lambda cls: cls.__name__)
def test_each_option_has_a_flag_somewhere(group: type) -> None:
    for field in fields(group):
        owners = [
            parser.prog
            for parser in commands().values()
            if (action := flags_of(parser).get(flag_of(field.name))) and action.dest == field.name and action.help
        ]
        assert owners, f"{group.__name__}.{field.name} has no flag"


@pytest.mark.parametrize(
    ("command", "cls"),
    [
        ("izh serve", izh.config.EngineOptions),
        ("izh serve", izh.config.ServerOptions),
        ("izh run", izh.config.EngineOptions),
        ("izh run", izh.cli.options.AnswerOptions),
        ("izh chat", izh.config.EngineOptions),
        ("izh embed", izh.cli.options.EmbedOptions),
        ("izh rerank", izh.cli.options.RerankOptions),
        ("izh bench embed", izh.bench.options.EmbedBenchOptions),
        ("izh bench rerank", izh.bench.options.RerankBenchOptions),
        ("izh bench mixed", izh.bench.options.MixedOptions),
        ("izh bench throughput", izh.bench.options.ThroughputOptions),
        ("izh bench lora", izh.bench.options.LoraOptions),
        ("izh bench turns", izh.bench.options.TurnsOptions),
        ("izh bench peers", izh.bench.peers.options.PeersOptions),
        ("izh bench images", izh.bench.options.ImagesOptions),
    ],
)
def test_a_command_takes_all_of_its_options(command: str, cls: type) -> None:
    flags = flags_of(commands()[command])
    assert {flag_of(field.name) for field in fields(cls)} <= set(flags)


def test_groups_of_the_engine_cover_its_fields() -> None:
    groups = groups_of(izh.config.EngineOptions)
    names = [field.name for group in groups for field in fields(group)]
    assert sorted(names) == sorted(field.name for field in fields(izh.config.EngineOptions))
