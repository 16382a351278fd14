"""An encoder's tokenizer: single texts, pairs, cutting, as transformers does them."""

import threading

import encoders_made
import pytest

from izh.errors import ModelLoadError, RequestError
from izh.text.encoding import EncoderTokenizer

QUERY, DOCUMENT = "the quick query", "over the lazy dog, für Äpfel 日本 def f(x): return x"


@pytest.mark.parametrize("family", encoders_made.FAMILIES)
@pytest.mark.parametrize("max_length", [None, 5, 9, 12, 60])
def test_texts_and_pairs_are_those_of_transformers(family, max_length) -> None:
    ours, theirs = EncoderTokenizer(encoders_made.tokenizer(family)), encoders_made.tokenizer(family)
    cut = {"truncation": "longest_first", "max_length": max_length} if max_length else {}
    expected = theirs([QUERY, "", DOCUMENT], **cut)
    got = ours.encode_many([QUERY, "", DOCUMENT], max_length)
    assert [tokens.ids for tokens in got] == expected["input_ids"]
    pair = theirs(QUERY, DOCUMENT, **cut)
    (tokens,) = ours.encode_pairs(QUERY, [DOCUMENT], max_length)
    assert tokens.ids == pair["input_ids"]
    assert tokens.type_ids == pair.get("token_type_ids")
    assert (tokens.type_ids is not None) == (family == "bert")
    if max_length is None:
        assert ours.encode(QUERY) == got[0].ids
        assert ours.encode_pair(QUERY, DOCUMENT) == tokens
        assert len(tokens.ids) > 20
    else:
        assert len(tokens.ids) <= max_length


def test_settings_of_the_file_neither_pad_nor_cut(tmp_path) -> None:
    hf = encoders_made.tokenizer("bert")
    hf.backend_tokenizer.enable_padding(length=30)
    hf.backend_tokenizer.enable_truncation(4)
    hf.save_pretrained(tmp_path)
    ours = EncoderTokenizer.load(tmp_path)
    assert ours.encode(DOCUMENT) == EncoderTokenizer(encoders_made.tokenizer("bert")).encode(DOCUMENT)


def test_lowering_goes_before_the_tokenizers_own_normalizing() -> None:
    plain = EncoderTokenizer(encoders_made.tokenizer("bert"))
    lower = EncoderTokenizer(encoders_made.tokenizer("bert"), lower_case=True)
    assert lower.encode("QUICK") == plain.encode("quick") != plain.encode("QUICK")


def test_half_a_surrogate_pair_is_a_refusal() -> None:
    tokenizer = EncoderTokenizer(encoders_made.tokenizer("bert"))
    for call in (lambda: tokenizer.encode("a\ud800"), lambda: tokenizer.encode_pair("a", "\udfff")):
        with pytest.raises(RequestError, match="surrogate"):
            call()


def test_what_is_no_tokenizer_is_named(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        EncoderTokenizer.load(tmp_path)


def test_cutting_in_several_threads_changes_no_other_call() -> None:
    tokenizer = EncoderTokenizer(encoders_made.tokenizer("bert"))
    wrong: list[tuple[int | None, int]] = []
    whole = len(tokenizer.encode(DOCUMENT))

    def work(max_length: int | None) -> None:
        for _ in range(100):
            (tokens,) = tokenizer.encode_many([DOCUMENT], max_length)
            if len(tokens.ids) != (max_length or whole):
                wrong.append((max_length, len(tokens.ids)))

    threads = [threading.Thread(target=work, args=(length,)) for length in (None, 7, 12, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
