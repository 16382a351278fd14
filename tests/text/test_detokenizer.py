"""Incremental detokenizing against the library's decoding of the whole."""

import re
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from izh.text.detokenizer import WindowDetokenizer, detokenizer
from izh.text.pieces import Pieces

TEXTS = [
    "the fox",
    "日本 the dogs",
    "👩‍👩‍👧 fox 🇫🇷",
    "naïve café",
    "  the  the",
    "<tool>two words<|im_end|>the",
    "မြန်မာ the",
]
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SEPARATOR = "<sep>"

check = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def token_lists(backend: Backend, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Any ids, also without a token; real texts; and real texts with ids put in or taken out."""
    any_id = st.integers(0, backend.get_vocab_size() + 1)
    encoded = st.sampled_from(TEXTS).map(lambda text: backend.encode(text, add_special_tokens=False).ids)
    part = st.one_of(
        st.lists(any_id, max_size=6), encoded, encoded.map(lambda ids: ids[1:]), encoded.map(lambda ids: ids[:-1])
    )
    return st.lists(part, max_size=5).map(lambda parts: list(chain.from_iterable(parts))[:max_size])


def expected(backend: Backend, token_ids: list[int], skip: bool) -> str:
    """The library's decoding, but with the characters before the first invalid byte of a run of byte tokens kept.

    The library is made to keep them by a separator token, which is then taken out of its text.
    """
    if not Pieces(backend).joining.byte_fallback:
        return backend.decode(token_ids, skip_special_tokens=skip)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    separator = backend.token_to_id(SEPARATOR)
    out: list[int] = []
    run: list[int] = []

    def end_run() -> None:
        raw = bytes(int(backend.id_to_token(i)[3:5], 16) for i in run)
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            num_valid = error.start
            out.extend(run[:num_valid])
            if num_valid:
                out.append(separator)
            out.extend(run[num_valid:])
        else:
            out.extend(run)
        run.clear()

    plain = [i for i in token_ids if backend.id_to_token(i) is not None and not (skip and i in special)]
    for token_id in plain:
        if BYTE_TOKEN.fullmatch(backend.id_to_token(token_id)):
            run.append(token_id)
        else:
            end_run()
            out.append(token_id)
    end_run()
    return backend.decode(out, skip_special_tokens=skip).replace(SEPARATOR, "")


@check
@given(data=st.data(), skip=st.booleans())
def test_pieces_add_up_to_the_whole_decoding(backend: Backend, data: st.DataObject, skip: bool) -> None:
    token_ids = data.draw(token_lists(backend))
    if Pieces(backend).joining.byte_fallback:
        token_ids = [i for i in token_ids if i != backend.token_to_id(SEPARATOR)]
    stream = detokenizer(Pieces(backend), skip_special_tokens=skip)
    pieces = [stream.push([token_id]) for token_id in token_ids] + [stream.flush()]
    assert "".join(pieces) == expected(backend, token_ids, skip)


@check
@given(data=st.data(), skip=st.booleans())
def test_after_a_prompt_the_pieces_are_what_the_tokens_add(backend: Backend, data: st.DataObject, skip: bool) -> None:
    prompt, answer = data.draw(token_lists(backend)), data.draw(token_lists(backend))
    pieces = Pieces(backend)
    whole = detokenizer(pieces, skip_special_tokens=skip)
    whole.push(prompt)
    stream = detokenizer(pieces, prompt, skip)
    for token_id in answer:
        assert stream.push([token_id]) == whole.push([token_id])
    assert stream.flush() == whole.flush()


@check
@given(data=st.data())
def test_how_tokens_are_grouped_does_not_matter(backend: Backend, data: st.DataObject) -> None:
    groups = [data.draw(token_lists(backend)) for _ in range(3)]
    by_group, by_token = (detokenizer(Pieces(backend)) for _ in range(2))
    grouped = "".join(by_group.push(group) for group in groups) + by_group.flush()
    single = "".join(by_token.push([i]) for group in groups for i in group) + by_token.flush()
    assert grouped == single


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "metaspace_bytes"])
@pytest.mark.parametrize("char", ["é", "世", "😀", "ြ"])
def test_a_character_comes_out_with_its_last_token(backends: dict[str, Backend], name: str, char: str) -> None:
    backend = backends[name]
    pieces = Pieces(backend)
    of_byte = {pieces.raw(i): i for i in range(backend.get_vocab_size()) if len(pieces.raw(i)) == 1}
    if name != "byte_level":
        of_byte = {bytes([b]): backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    token_ids = [of_byte[bytes([b])] for b in char.encode()]
    stream = detokenizer(pieces)
    pushed = [stream.push([token_id]) for token_id in token_ids]
    assert pushed == [""] * (len(token_ids) - 1) + [char]
    assert stream.flush() == ""


def test_a_run_of_bytes_that_turns_invalid_keeps_its_characters(backends: dict[str, Backend]) -> None:
    backend = backends["llama"]
    token_ids = [backend.token_to_id(f"<0x{b:02X}>") for b in "မြ".encode()[:-1]]
    stream = detokenizer(Pieces(backend))
    assert stream.push(token_ids) == "မ"
    assert stream.flush() == "\ufffd\ufffd"
    invalid = [backend.token_to_id(token) for token in ("<0xFF>", "<0x41>", "▁fox")]
    assert detokenizer(Pieces(backend)).push(invalid) == backend.decode(invalid) == "\ufffd\ufffd fox"


@pytest.mark.parametrize(
    ("name", "prompt", "first"),
    [("llama", [], "the"), ("llama", ["▁fox"], " the"), ("metaspace", [], "the"), ("metaspace", ["▁fox"], " the")],
)
def test_the_leading_space_depends_on_the_prompt(
    backends: dict[str, Backend], name: str, prompt: list[str], first: str
) -> None:
    backend = backends[name]
    stream = detokenizer(Pieces(backend), [backend.token_to_id(token) for token in prompt])
    assert stream.push([backend.token_to_id("▁the")]) == first


def test_a_skipped_special_token_in_the_prompt_is_no_text(backends: dict[str, Backend]) -> None:
    backend = backends["llama"]
    bos, the = backend.token_to_id("<s>"), backend.token_to_id("▁the")
    assert detokenizer(Pieces(backend), [bos], skip_special_tokens=True).push([the]) == "the"
    assert detokenizer(Pieces(backend), [bos], skip_special_tokens=False).push([the]) == " the"


def test_endless_invalid_bytes_are_let_out(backends: dict[str, Backend]) -> None:
    pieces = Pieces(backends["byte_level"])
    (invalid,) = (i for i in range(400) if pieces.raw(i) == b"\xff")
    assert detokenizer(pieces).push([invalid] * 50) == "\ufffd" * 50


def test_unknown_decoders_use_the_library(backends: dict[str, Backend]) -> None:
    backend = backends["word_piece"]
    stream = detokenizer(Pieces(backend))
    assert isinstance(stream, WindowDetokenizer)
    ids = [backend.token_to_id(token) for token in ("jump", "##ed", "the", "fox", "##es", ".")]
    assert [stream.push([i]) for i in ids] == ["jump", "ed", " the", " fox", "es", "."]


def test_the_window_lets_replacement_characters_out_after_a_while(backends: dict[str, Backend]) -> None:
    backend = Backend.from_str(backends["no_decoder"].to_str())
    backend.add_tokens(["\ufffd"])
    odd = backend.token_to_id("\ufffd")
    stream = detokenizer(Pieces(backend))
    ids = [odd] * (3 * WindowDetokenizer.MAX_HELD)
    out = [stream.push([i]) for i in ids]
    assert "".join(out) != ""
    assert "".join(out) + stream.flush() == backend.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "llama"])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_begun_in_the_prompt_belongs_to_the_answer(
    backends: dict[str, Backend], name: str, num_bytes: int
) -> None:
    pieces = Pieces(backends[name])
    of_byte = {pieces[i]: i for i in range(backends[name].get_vocab_size()) if isinstance(pieces[i], bytes)}
    token_ids = [of_byte[bytes([byte])] for byte in "a🦊".encode()]
    stream = detokenizer(pieces, token_ids[: 1 + num_bytes])
    assert stream.push(token_ids[1 + num_bytes :]) + stream.flush() == "🦊"
