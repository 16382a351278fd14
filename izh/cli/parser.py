"""The tree of commands.

Owns: which commands exist, what each takes, and the answer to an option that does not exist.
Must not know: how options become flags (`flags.py`), what commands do (`commands.py`).
"""

import argparse
import difflib
from collections.abc import Callable, Sequence

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

    bench = tree.add_parser("bench", help="measure", description="Measure.", allow_abbrev=False)
    benches = bench.add_subparsers(metavar="WHAT", required=True)
    throughput = _add(
        benches,
        "throughput",
        "[MODEL] [options]",
        commands.bench_throughput,
        "prefill and decode rates, beside transformers",
    )
    _add_model(throughput)
    add_flags(throughput, ThroughputOptions, EngineOptions)
    lora = _add(
        benches,
        "lora",
        "[MODEL] [options]",
        commands.bench_lora,
        "rates with many adapters in one batch, beside the base alone and PEFT",
    )
    _add_model(lora)
    add_flags(lora, LoraOptions, EngineOptions)
    turns = _add(
        benches,
        "turns",
        "[MODEL] [options]",
        commands.bench_turns,
        "first tokens and rates with more adapters than slots",
    )
    _add_model(turns)
    add_flags(turns, TurnsOptions, EngineOptions)

    images = _add(
        benches,
        "images",
        "[MODEL] [options]",
        commands.bench_images,
        "first tokens of prompts with images, new and seen before, beside transformers",
    )
    _add_model(images)
    add_flags(images, ImagesOptions, EngineOptions)
    perplexity = _add(
        benches,
        "perplexity",
        "[MODEL] [options]",
        commands.bench_perplexity,
        "how well a text is predicted, with the weights as they are and in 8 bits",
    )
    _add_model(perplexity)
    add_flags(perplexity, PerplexityOptions, EngineOptions)
    peers = _add(
        benches,
        "peers",
        "[MODEL] [options]",
        commands.bench_peers,
        "izh and every installed peer on the same work, into one report",
    )
    _add_model(peers)
    add_flags(peers, PeersOptions, EngineOptions)

    embeds = _add(
        benches,
        "embed",
        "[MODEL] [options]",
        commands.bench_embed,
        "vectors offline and over HTTP, beside sentence-transformers and Infinity",
    )
    _add_model(embeds)
    add_flags(embeds, EmbedBenchOptions, EngineOptions)
    reranks = _add(benches, "rerank", "[options]", commands.bench_rerank, "scores, beside CrossEncoder")
    add_flags(reranks, RerankBenchOptions)
    mixed = _add(
        benches,
        "mixed",
        "[MODEL] [options]",
        commands.bench_mixed,
        "all kinds of request at once, each answer compared with its lone answer",
    )
    _add_model(mixed)
    add_flags(mixed, MixedOptions, EngineOptions)

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
