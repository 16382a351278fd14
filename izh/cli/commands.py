"""What each command does: options in, one call to the part that does it.

Owns: nothing but these hand-overs. Every import of weight stays inside its function, so that the command line itself
answers at once. Each function returns the exit status.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

from izh.cli.flags import take
from izh.cli.options import AnswerOptions, EmbedOptions, RerankOptions
from izh.config import EngineOptions, ServerOptions
from izh.version import __version__

if TYPE_CHECKING:
    from izh.llm import LLM


def serve(arguments: argparse.Namespace) -> int:
    """Serve over HTTP until told to stop."""
    from izh.engine.async_llm import AsyncLLM
    from izh.server.app import Server

    engine, server = take(EngineOptions, arguments), take(ServerOptions, arguments)
    if engine.model == "demo":
        server = replace(server, embedder=server.embedder or "demo", reranker=server.reranker or "demo")
        server = replace(server, vision=server.vision or "demo")
    Server(AsyncLLM(engine), server).run()
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Answer one prompt."""
    from izh.cli.terminal import answer_once

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    return answer_once(_load(arguments), prompt, take(AnswerOptions, arguments), raw=arguments.raw)


def chat(arguments: argparse.Namespace) -> int:
    """Talk in the terminal."""
    from izh.cli.terminal import Conversation, talk

    return talk(Conversation(_load(arguments), take(AnswerOptions, arguments)))


def embed(arguments: argparse.Namespace) -> int:
    """Write the vectors of lines."""
    from izh.cli.pooling import embed_lines

    return embed_lines(arguments.file, take(EmbedOptions, arguments))


def rerank(arguments: argparse.Namespace) -> int:
    """Print lines in the order of their scores."""
    from izh.cli.pooling import rerank_lines

    return rerank_lines(arguments.query, arguments.file, take(RerankOptions, arguments))


def features(arguments: argparse.Namespace) -> int:
    """Show what the engine does."""
    from izh.cli.features import tour

    return tour(_load(arguments))


def bench(module: str, groups: Sequence[type], arguments: argparse.Namespace) -> int:
    """Measure what the module is about."""
    status: int = import_module(module).report(*(take(group, arguments) for group in groups))
    return status


def fetch(arguments: argparse.Namespace) -> int:
    """Download or convert a model, and say where it lies."""
    from izh.model.source import resolve

    print(resolve(arguments.model, arguments.revision).path)
    return 0


def version(_arguments: argparse.Namespace) -> int:
    """Print versions, for bug reports."""
    print(f"izh {__version__} (Python {platform.python_version()}, {platform.machine()}, {platform.system()})")
    for package in ("torch", "transformers", "numba"):
        try:
            print(f"{package} {version_of(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed")
    return 0


def _load(arguments: argparse.Namespace) -> "LLM":
    from dataclasses import asdict

    from izh.llm import LLM

    return LLM(**asdict(take(EngineOptions, arguments)), quiet=not sys.stderr.isatty())
