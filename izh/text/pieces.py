"""What each token of a vocabulary contributes to a text.

Owns: Joining (which rule the checkpoint's decoder follows) and Pieces (token id -> text or bytes, filled on demand).
Must not know: requests, streaming. Called by `tokenizer.py` and `detokenizer.py`.
Invariant: for the kinds "bytes" and "spaces", the pieces joined by the rule are what the `tokenizers` decoder gives;
any decoder whose steps are not recognised exactly is of kind "other", which only the library itself decodes.

    kind      decoder steps                                        examples
    bytes     ByteLevel                                            GPT-2, Llama 3, Qwen, SmolLM
    spaces    Replace, ByteFallback, Fuse, Strip   or  Metaspace   Llama 2, Mistral, Gemma, T5
    other     none, WordPiece, BPEDecoder, ...                     BERT, toy tokenizers
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """How tokens become text.

    `byte_fallback`: a token <0xNN> is one byte of a UTF-8 character. `strip`: so many leading spaces of the whole text
    are dropped. `bare_first`: the whole text's first token loses its space marks.
    """

    kind: Literal["bytes", "spaces", "other"]
    byte_fallback: bool = False
    strip: int = 0
    bare_first: bool = False


class Pieces(dict[int, bytes | str]):
    """Token id -> its contribution: bytes that join with their neighbours' into characters, or text of its own.

    An id without a token (models pad their vocabularies) contributes "", as the library's decode() has it.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self.joining = joining(backend.decoder)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def __missing__(self, token_id: int) -> bytes | str:
        try:
            token = self._backend.id_to_token(token_id)
        except OverflowError:  # negative, or beyond 32 bits: only a prompt can hold it
            token = None
        if not token:
            return ""  # not remembered: there is no end of such ids
        piece = self[token_id] = self._read(token)
        return piece

    def _read(self, token: str) -> bytes | str:
        if self.joining.kind == "bytes":
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if self.joining.kind == "spaces":
            if self.joining.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes.fromhex(match[1])
            return token.replace(SPACE_MARK, " ")
        return token

    def raw(self, token_id: int) -> bytes:
        """The token's bytes."""
        piece = self[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()

    def first(self, token_id: int) -> str:
        """The token's text as the first of a text whose joining has `bare_first`."""
        return (self._backend.id_to_token(token_id) or "").replace(SPACE_MARK, "")

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """The library's own decoding of a whole text."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


def joining(decoder: Any) -> Joining:
    """The rule that `decoder` (a `tokenizers` decoder, or None) follows."""
    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    names = "".join(f"{step['type']} " for step in steps)
    if re.fullmatch(r"ByteLevel (Fuse )?", names):
        return Joining(kind="bytes")
    # The order matters. Space marks written by bytes are text, so ByteFallback comes after what rewrites the marks; it
    # needs the tokens apart, so Fuse comes after it; and a Strip before Fuse would strip every token.
    if match := re.fullmatch(r"Metaspace (ByteFallback )?(Fuse )?", names):
        if steps[0]["replacement"] == SPACE_MARK:
            bare_first = steps[0]["prepend_scheme"] != "never"
            return Joining(kind="spaces", byte_fallback=match[1] is not None, bare_first=bare_first)
    elif match := re.fullmatch(r"Replace (ByteFallback )?(Fuse (Strip )?)?", names):
        strip = int(steps[-1]["start"]) if match[3] else 0
        marks = steps[0]["pattern"] == {"String": SPACE_MARK} and steps[0]["content"] == " "
        if marks and (not match[3] or (steps[-1]["content"], steps[-1]["stop"]) == (" ", 0)):
            return Joining(kind="spaces", byte_fallback=match[1] is not None, strip=strip)
    return Joining(kind="other")


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: a printable Latin-1 character stands for its own byte, and the 68 remaining bytes, in
    order, for the characters from U+0100 on (Radford et al. 2019, the GPT-2 encoder)."""
    alphabet = ByteLevel.alphabet()
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    table = {char: ord(char) for char in alphabet if ord(char) < 256}
    table.update(zip(sorted(char for char in alphabet if ord(char) >= 256), others, strict=True))
    return table


_BYTE_OF_CHAR = _byte_of_char()
