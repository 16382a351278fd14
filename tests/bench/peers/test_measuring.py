"""Sections measured with fake peers in real processes: figures, comparisons, and who is left out."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_peer
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from izh.bench.peers.measuring import NUM_TEXTS, LeftOut, Texts, Turns, cosine
from izh.bench.peers.remote import Load, Remote
from izh.bench.peers.sections import Entry, Group
from izh.bench.timing import PromptSource
from izh.errors import OptionError

DRIVER = Path(fake_peer.__file__)


def entry(label: str, **options: Any) -> Entry:
    return Entry(label=label, peer=None, driver="fake", options=options)


def start(one: Entry) -> Remote:
    if one.options.get("fails") == "form":
        raise OptionError("no such form")
    remote = Remote(one.label, Path(sys.executable), DRIVER, 30)
    remote.load(Load(model="m", dtype="fp32", num_threads=1, options=one.options))
    return remote


def prompts() -> Callable[[int], PromptSource]:
    return lambda length: PromptSource(100, frozenset(), length, seed=length)


def test_each_cell_has_its_figures_and_their_comparison() -> None:
    calls: list[int] = []
    turns = Turns("b", 2, lambda: calls.append(1))
    group = Group(adapters=0, cells=((1, 4), (2, 8)))
    turns.text(group, [entry("a"), entry("b")], start, prompts(), 16)
    assert [(each.engine, each.batch, each.prompt_tokens, each.adapters) for each in turns.figures] == [
        ("a", 1, 4, 0),
        ("b", 1, 4, 0),
        ("a", 2, 8, 0),
        ("b", 2, 8, 0),
    ]
    assert [each.agreement for each in turns.figures] == [1.0] * 4
    assert all(each.decode > 0 for each in turns.figures)
    assert turns.left_out == []
    assert len(calls) == 2 * 2 * 5


def test_what_fails_is_left_out_by_name_and_the_others_are_measured() -> None:
    turns = Turns("gone", 1, lambda: None)
    entries = [
        entry("a"),
        entry("no model", fails="load"),
        entry("no form", fails="form"),
        entry("later", fails="long"),
    ]
    turns.text(Group(adapters=3, cells=((2, 4),)), entries, start, prompts(), 16)
    assert [(each.engine, each.agreement) for each in turns.figures] == [("a", None)]
    assert turns.left_out == [
        LeftOut(engine="no model", why="ValueError: no such model", adapters=3),
        LeftOut(engine="no form", why="no such form", adapters=3),
        LeftOut(engine="later", why="RuntimeError: out of memory", batch=2, prompt_tokens=4, adapters=3),
    ]


def test_nobody_left_is_no_figure() -> None:
    turns = Turns("a", 1, lambda: None)
    turns.text(Group(adapters=0, cells=((1, 4),)), [entry("a", fails="raise")], start, prompts(), 4)
    assert turns.figures == []
    assert [each.engine for each in turns.left_out] == ["a"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    words = ["river", "stone", "of", "##ing", "Paris", "[UNK]"]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return made


def test_embeddings_are_timed_and_compared(tokenizer: Tokenizer) -> None:
    turns = Turns("a", 2, lambda: None)
    turns.embeddings([entry("a"), entry("b", fails="turned")], start, Texts(tokenizer))
    assert [each.engine for each in turns.figures] == ["a", "b"]
    assert [each.agreement for each in turns.figures] == [pytest.approx(1), pytest.approx(0.5**0.5)]
    for figure in turns.figures:
        assert figure.tokens_per_s > figure.texts_per_s > 0


def test_texts_are_of_whole_words_and_never_repeated(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    first, num_tokens = texts.take()
    assert len(first) == NUM_TEXTS
    assert {word for text in first for word in text.split()} == {"river", "stone"}
    assert num_tokens == sum(len(text.split()) for text in first)
    assert texts.take()[0] != first
    assert Texts(tokenizer).take() == (first, num_tokens)


def test_cosine_is_the_mean_of_the_rows() -> None:
    a, b = np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([[3.0, 0.0], [0.0, 5.0]])
    assert cosine([a], [b]) == pytest.approx(0.5)
