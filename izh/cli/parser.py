"""The tree of commands.

Owns: which commands exist, what each takes, and the answer to an option that does not exist.
Must not know: how options become flags (`flags.py`), what commands do (`commands.py`).
"""

import argparse
import difflib
from collections.abc import Callable, Sequence
from functools import partial

from izh.bench.options import (
    EmbedBenchOptions,
    ImagesOptions,
    LoraOptions,
    MixedOptions,
    PerplexityOptions,
    RerankBenchOptions,
    ThroughputOptions,
    TurnsOptions,
)
from izh.bench.peers.options import PeersOptions
from izh.cli import commands
from izh.cli.flags import add_flags
from izh.cli.options import AnswerOptions, EmbedOptions, RerankOptions
from izh.config import EngineOptions, ServerOptions
from izh.version import __version__

Command = Callable[[argparse.Namespace], int]

# name, module below izh.bench, what its `report` takes, effect
_BENCHES: tuple[tuple[str, str, tuple[type, ...], str], ...] = (
    ("throughput", "throughput", (EngineOptions, ThroughputOptions), "prefill and decode rates, beside transformers"),
    (
        "lora",
        "lora",
        (EngineOptions, LoraOptions),
        "rates with many adapters in one batch, beside the base alone and PEFT",
    ),
    ("turns", "turns", (EngineOptions, TurnsOptions), "first tokens and rates with more adapters than slots"),
    (
        "images",
        "images",
        (EngineOptions, ImagesOptions),
        "first tokens of prompts with images, new and seen before, beside transformers",
    ),
    (
        "perplexity",
        "perplexity",
        (EngineOptions, PerplexityOptions),
        "how well a text is predicted, with the weights as they are, in 8 and in 4 bits",
    ),
    (
        "peers",
        "peers.report",
        (EngineOptions, PeersOptions),
        "izh and every installed peer on the same work, into one report",
    ),
    (
        "embed",
        "embed",
        (EngineOptions, EmbedBenchOptions),
        "vectors offline and over HTTP, beside sentence-transformers and Infinity",
    ),
    ("rerank", "rerank", (RerankBenchOptions,), "scores, beside CrossEncoder"),
    (
        "mixed",
        "mixed",
        (EngineOptions, MixedOptions),
        "all kinds of request at once, each answer compared with its lone answer",
    ),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed line, with `command` set to what runs it. Exits with status 2 and a message when it makes no sense."""
    arguments, unknown = build_parser().parse_known_args(argv)
    parser: argparse.ArgumentParser = arguments.parser
    if unknown:
        parser.error(_complaint(parser, unknown[0]))
    if getattr(arguments, "model_argument", None) is not None:
        if arguments.model not in (parser.get_default("model"), arguments.model_argument):
            parser.error(f"two models: {arguments.model_argument!r} and --model {arguments.model!r}; give one")
        arguments.model = arguments.model_argument
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="izh", description="One resident base model, many kinds of request, one batch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"izh {__version__}")
    tree = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = _add(tree, "serve", "[MODEL] [options]", commands.serve, "serve a model over HTTP, as the OpenAI API does")
    _add_model(serve)
    add_flags(serve, EngineOptions, ServerOptions)

    run = _add(tree, "run", "PROMPT [MODEL] [options]", commands.run, "answer one prompt")
    run.add_argument("prompt", metavar="PROMPT", help="what to answer; '-' reads standard input")
    _add_model(run)
    run.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without the chat template")
    add_flags(run, AnswerOptions, EngineOptions)

    chat = _add(tree, "chat", "[MODEL] [options]", commands.chat, "talk to a model in the terminal")
    _add_model(chat)
    add_flags(chat, AnswerOptions, EngineOptions)

    embed = _add(tree, "embed", "[FILE] [options]", commands.embed, "write the vector of each line of a file")
    _add_file(embed)
    add_flags(embed, EmbedOptions)

    rerank = _add(
        tree, "rerank", "--query TEXT [FILE] [options]", commands.rerank, "print a file's lines, the best answer first"
    )
    rerank.add_argument("--query", metavar="TEXT", required=True, help="what the lines are to answer")
    _add_file(rerank)
    add_flags(rerank, RerankOptions)

    features = _add(
        tree,
        "features",
        "[MODEL] [options]",
        commands.features,
        "a tour of what the engine does, each part run for real",
    )
    _add_model(features)
    add_flags(features, EngineOptions)

    measuring = tree.add_parser("bench", help="measure", description="Measure.", allow_abbrev=False)
    benches = measuring.add_subparsers(metavar="WHAT", required=True)
    for name, module, groups, effect in _BENCHES:
        loads = EngineOptions in groups
        measure = partial(commands.bench, f"izh.bench.{module}", groups)
        bench = _add(benches, name, "[MODEL] [options]" if loads else "[options]", measure, effect)
        if loads:
            _add_model(bench)
        add_flags(bench, *reversed(groups))

    fetch = _add(tree, "fetch", "MODEL [--revision TEXT]", commands.fetch, "get a model ahead of time")
    fetch.add_argument("model", metavar="MODEL", help="'demo' or a hub id")
    fetch.add_argument("--revision", metavar="TEXT", help="hub branch, tag or commit; default: the main branch")

    _add(tree, "version", "", commands.version, "versions of izh and of what it stands on")
    return parser


def _add(
    tree: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, usage: str, command: Command, effect: str
) -> argparse.ArgumentParser:
    parser = tree.add_parser(
        name,
        usage=f"%(prog)s {usage}".rstrip(),  # every flag of it would fill the screen before each error
        help=effect,
        description=effect[0].upper() + effect[1:] + ".",
        allow_abbrev=False,
    )
    parser.set_defaults(command=command, parser=parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="one text a line, in UTF-8; '-', or none: standard input"
    )


def _complaint(parser: argparse.ArgumentParser, word: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    name = word.split("=")[0]
    flags = [flag for action in parser._actions for flag in action.option_strings]
    closest = difflib.get_close_matches(name, flags, n=1, cutoff=0.5)
    hint = f"did you mean {closest[0]}?" if closest else "see --help"
    return f"unknown option {name}; {hint}"
