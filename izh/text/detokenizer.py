"""Token ids to text, piece by piece, as they are generated.

Owns: the three incremental detokenizers, one per kind of joining (`pieces.py`), and the choice among them.
Must not know: requests, stop strings.
Invariant: what `push` and `flush` return, joined, is `Tokenizer.decode` of all ids; after a prompt, it is what the ids
add to the decoded prompt. A character split over tokens comes out with its last byte; one that stays incomplete comes
out of `flush` as U+FFFD. The cost per token is constant.

Why no library stream: `tokenizers.decoders.DecodeStream` decodes its window twice per token, holds back without bound
while bytes stay invalid, and raises when a run of byte tokens turns invalid.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from izh.text.pieces import Pieces

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one growing sequence of tokens."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens; returns the text that is certain now."""

    def flush(self) -> str:
        """No more tokens: returns the text still held back."""


def detokenizer(pieces: Pieces, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for the tokens that follow the prompt. Reads only the prompt's last tokens."""
    skip = pieces.special_ids if skip_special_tokens else frozenset[int]()
    if pieces.joining.kind == "bytes":
        return ByteDetokenizer(pieces, skip, prompt_token_ids)
    if pieces.joining.kind == "spaces":
        return SpaceDetokenizer(pieces, skip, prompt_token_ids)
    return WindowDetokenizer(pieces, skip, prompt_token_ids)


class ByteDetokenizer:
    """Byte-level BPE: the tokens' bytes, decoded as one UTF-8 stream.

    A prompt that ends inside a character leaves it to the answer.
    """

    def __init__(self, pieces: Pieces, skip: frozenset[int], prompt_token_ids: Sequence[int]) -> None:
        self._raw = pieces.raw
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= 3:  # an unfinished character has at most 3 bytes, and its first byte starts afresh
                break
            tail = (b"" if token_id in skip else self._raw(token_id)) + tail
        self._utf8.decode(tail)

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join([self._raw(i) for i in token_ids if i not in self._skip]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class SpaceDetokenizer:
    """SentencePiece-like vocabularies: text with marked spaces, and runs of byte tokens <0xNN>.

    Within a run each character comes out when complete. From a run's first invalid byte on, every byte is U+FFFD, as
    the library has it; but the library then takes back the run's earlier characters too, which a stream cannot, and
    which would turn a whole word into U+FFFD when an answer is cut inside a character.
    """

    def __init__(self, pieces: Pieces, skip: frozenset[int], prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._bare_first = pieces.joining.bare_first  # still to come: the whole text's first token
        self._strip = pieces.joining.strip  # leading spaces that may still be dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._held = 0  # bytes of an unfinished character
        self._invalid = False  # inside a run of byte tokens that is no UTF-8
        self.push(self._tail(prompt_token_ids))

    def _tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens: a whole run of bytes, if it ends in one, and enough text to settle `strip`."""
        tail: list[int] = []
        num_texts = 0
        for token_id in reversed(prompt_token_ids):
            if num_texts > self._pieces.joining.strip:
                break
            if token_id not in self._skip and (piece := self._pieces[token_id]):
                tail.append(token_id)
                num_texts += isinstance(piece, str)
        return tail[::-1]

    def push(self, token_ids: Iterable[int]) -> str:
        out: list[str] = []
        for token_id in token_ids:
            if token_id in self._skip:
                continue
            piece = self._pieces[token_id]
            if isinstance(piece, bytes):
                out.append(self._push_byte(piece))
            elif piece:
                out.append(self._end_run())
                out.append(self._pieces.first(token_id) if self._bare_first else piece)
            else:
                continue
            self._bare_first = False
        return self._stripped("".join(out))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _push_byte(self, byte: bytes) -> str:
        if self._invalid:
            return REPLACEMENT
        self._held += 1
        try:
            char = self._utf8.decode(byte)
        except UnicodeDecodeError:
            text = self._end_run()
            self._invalid = True
            return text
        if char:
            self._held = 0
        return char

    def _end_run(self) -> str:
        """Give up an unfinished character; what follows starts afresh."""
        text = REPLACEMENT * self._held
        if text:
            self._utf8.reset()
            self._held = 0
        self._invalid = False
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowDetokenizer:
    """Any other decoder: re-decode a short window and return what is new in it.

    The window starts with tokens whose text is already out, because such decoders treat a text's first and last token
    differently. U+FFFD at the end may become a character, but not for more than MAX_HELD tokens.
    """

    CONTEXT = 4
    MAX_HELD = 8

    def __init__(self, pieces: Pieces, skip: frozenset[int], prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(self._window) == self.CONTEXT:
                break
            if self._counts(token_id):
                self._window.insert(0, token_id)
        self._num_held = 0
        self._out = self._decode()  # the window's text that is out already

    def _counts(self, token_id: int) -> bool:
        return token_id not in self._skip and bool(self._pieces[token_id])

    def _decode(self) -> str:
        return self._pieces.decode(self._window, skip_special_tokens=False)

    def push(self, token_ids: Iterable[int]) -> str:
        new = [token_id for token_id in token_ids if self._counts(token_id)]
        if not new:
            return ""
        self._window += new
        self._num_held += len(new)
        text = self._decode()
        if text.endswith(REPLACEMENT) and self._num_held <= self.MAX_HELD:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode()) if self._num_held else ""

    def _emit(self, text: str) -> str:
        delta = text[len(self._out) :]
        del self._window[: -self.CONTEXT]
        self._num_held = 0
        self._out = self._decode()
        return delta
