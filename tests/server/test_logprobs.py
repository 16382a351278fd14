"""How log-probabilities are written: places in the text, alternatives, numbers that JSON cannot write."""

import json
import math

import pytest
import tiny_checkpoint

from izh.outputs import CompletionOutput
from izh.request import TokenLogprobs
from izh.server.logprobs import TokenLists, chat_logprobs, prompt_logprobs
from izh.text.tokenizer import Tokenizer

TEXT = "für 🙃 語ñ dog <|im_start|>x"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_checkpoint.tokenizer())


def entry(token_id, logprob=-1.0, rank=1, top=()):
    return TokenLogprobs(token_id, logprob, rank, list(top))


def check_places(tokenizer, text, lists):
    """A token of whole characters stands where its offset says; one of parts begins at or before its first byte."""
    seen = b""
    for piece, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        if "\\x" not in piece:
            assert text[offset : offset + len(piece)] == piece
        assert len(text[:offset].encode()) <= len(seen)
        seen += piece.encode().decode("unicode_escape").encode("latin-1") if "\\x" in piece else piece.encode()


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 8])
def test_offsets_are_places_in_the_text_also_across_cuts(tokenizer, cut):
    ids = tokenizer.encode(TEXT)
    assert any("\\x" in tokenizer.piece(i)[0] for i in ids), "some character should be split between tokens"
    lists = TokenLists(tokenizer, 0)
    first = lists.answer([entry(i) for i in ids[:cut]], frozenset())
    rest = lists.answer([entry(i) for i in ids[cut:]], frozenset())
    check_places(tokenizer, TEXT, {name: first[name] + rest[name] for name in first})


def test_an_echoed_prompt_begins_where_its_text_does(tokenizer):
    ids = tokenizer.encode(TEXT)
    lists = TokenLists(tokenizer, 0)
    echoed = lists.prompt(TEXT, [1, *ids], [None] + [entry(i) for i in ids])  # 1: put before the text by a tokenizer
    assert echoed["text_offset"][:2] == [0, 0]
    assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
    check_places(tokenizer, TEXT, {name: values[1:] for name, values in echoed.items()})
    after = lists.answer([entry(ids[-1])], frozenset())
    assert after["text_offset"] == [len(TEXT)]


def test_hidden_tokens_take_no_place(tokenizer):
    (x,) = tokenizer.encode("x")
    ids = [x, 2, x]
    hidden = TokenLists(tokenizer, 0).answer([entry(i) for i in ids], tokenizer.special_ids)
    assert hidden["text_offset"] == [0, 1, 1]
    visible = TokenLists(tokenizer, 0).answer([entry(i) for i in ids], frozenset())
    assert visible["text_offset"] == [0, 1, 1 + len("<|im_end|>")]


def test_top_logprobs_hold_k_and_the_actual_token(tokenizer):
    a, b, c = tokenizer.encode("a")[0], tokenizer.encode("b")[0], tokenizer.encode("c")[0]
    likely = [(a, -0.1), (b, -2.0), (c, -3.0)]
    (top,) = TokenLists(tokenizer, 2).answer([entry(c, -3.0, 3, likely)], frozenset())["top_logprobs"]
    assert top == {"a": -0.1, "b": -2.0, "c": -3.0}
    (top,) = TokenLists(tokenizer, 2).answer([entry(a, -0.1, 1, likely)], frozenset())["top_logprobs"]
    assert top == {"a": -0.1, "b": -2.0}
    (top,) = TokenLists(tokenizer, 0).answer([entry(b, -2.0, 2)], frozenset())["top_logprobs"]
    assert top == {"b": -2.0}


def test_prompt_logprobs_have_ranks(tokenizer):
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    first, second = prompt_logprobs(tokenizer, [None, entry(b, -9.0, 40, [(a, -0.5), (b + 1, -1.0)])], 1)
    assert first is None
    assert second == {
        str(b): {"logprob": -9.0, "rank": 40, "decoded_token": "b"},
        str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
    }


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_json_cannot_write_is_the_apis_least_number(tokenizer, value):
    odd = entry(5, value, 9, [(6, value)])
    written = [
        chat_logprobs(tokenizer, CompletionOutput(0, "x", [5], [odd])),
        prompt_logprobs(tokenizer, [odd], 1),
        TokenLists(tokenizer, 1).answer([odd], frozenset()),
    ]
    text = json.dumps(written, allow_nan=False)
    assert text.count("-9999.0") == 2 + 2 + 3  # the token and its alternative; the last has the token twice
