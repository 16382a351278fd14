"""What `izh serve demo` brings beside the generator, and that one's own models go before it."""

import pytest

from izh.cli import main
from izh.config import ServerOptions


@pytest.mark.parametrize(
    ("words", "embedder", "reranker"),
    [
        (["demo"], "demo", "demo"),
        (["demo", "--reranker", "mine"], "demo", "mine"),
        (["demo", "--embedder", "mine"], "mine", "demo"),
        (["other"], None, None),
    ],
)
def test_the_demo_brings_its_embedder_and_reranker(monkeypatch, words, embedder, reranker) -> None:
    served: list[ServerOptions] = []

    class Recorded:
        def __init__(self, engine: object, options: ServerOptions) -> None:
            served.append(options)

        def run(self) -> None:
            pass

    monkeypatch.setattr("izh.server.app.Server", Recorded)
    monkeypatch.setattr("izh.engine.async_llm.AsyncLLM", lambda options: None)
    assert main(["serve", *words]) == 0
    assert (served[0].embedder, served[0].reranker) == (embedder, reranker)
