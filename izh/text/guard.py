"""What somebody types stays text: control tokens come from the chat template alone.

Owns: Guard, which hides control tokens that are spelled in messages from the template and the tokenizer, and brings
them back as text; places in a prompt that stand for something other than text (an image).
Must not know: templates, messages, what a place stands for.
Invariants: a text without anything hidden is encoded by the tokenizer as it is, in one piece. Else the ids are those
that the tokenizer gives with its control tokens switched off, except where the template itself wrote one.

    typed     a <|im_end|> b        ->  a ALIAS b                            hide
    rendered  <|im_start|>a ALIAS b<|im_end|>                                by the template
    split     SPLIT a <|im_end|> b SPLIT                                     control tokens switched off
    ids       im_start, a, <, |, im, _, end, |, >, b, im_end                 SPLIT replaced by what was there
"""

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend


class Guard:
    """Safe to use from several threads."""

    def __init__(self, backend: Backend) -> None:
        """`backend` may not be changed any more."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._control_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._spelled = tuple(
            sorted({added[token_id].content for token_id in self._control_ids} - {""}, key=len, reverse=True)
        )
        # Some tokenizers find control tokens only after normalizing the text, so in any capitals.
        folds = any(added[token_id].normalized for token_id in self._control_ids) and backend.normalizer is not None
        self._pattern = re.compile("|".join(map(re.escape, self._spelled)) or r"(?!)", re.IGNORECASE if folds else 0)
        # Nobody can type what nobody can guess. Letters and digits only: nothing in a template changes them.
        self._secret = f"izh{secrets.token_hex(12)}"
        self._aliases = re.compile(self._secret + r"h(\d+)e")
        self.place = self._secret + "place"
        """Stands for one thing that is not text, wherever it is put in a message."""
        self._split = self._secret + "split"
        self._plain: Backend | None = None  # the tokenizer without control tokens; made when first needed
        self._lock = threading.Lock()

    def hide(self, value: Any, hidden: list[str]) -> Any:
        """A copy of `value` in which every control token that a string in it spells is replaced by an alias; `hidden`
        gets what was there."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._alias(found[0], hidden), value)
        if isinstance(value, Mapping):
            return {self.hide(key, hidden): self.hide(each, hidden) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(each, hidden) for each in value]
        return value

    def encode(self, text: str, hidden: list[str], place_id: int | None = None) -> list[int]:
        """Token ids of a text that may hold aliases (of `hidden`) and places (each becomes `place_id`)."""
        if not hidden and self.place not in text:
            return self._encode(self._backend, text).ids
        pieces: list[str] = []
        ids: list[int] = []
        done = 0
        for start, stop, token_id in self._found(text, place_id):
            pieces.append(self._revealed(text[done:start], hidden))
            ids.append(token_id)
            done = stop
        pieces.append(self._revealed(text[done:], hidden))
        plain = self._without_control_tokens()
        split_id = plain.token_to_id(self._split)
        following = iter(ids)
        return [
            next(following) if token_id == split_id else token_id
            for token_id in self._encode(plain, self._split.join(pieces)).ids
        ]

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that somebody typed, whatever they spell."""
        encodings = self._without_control_tokens().encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _found(self, text: str, place_id: int | None) -> list[tuple[int, int, int]]:
        """Where the template wrote a control token, and where a place is: start, stop and id, in order."""
        encoding = self._encode(self._backend, text)
        found = [
            (start, stop, token_id)
            for (start, stop), token_id in zip(encoding.offsets, encoding.ids, strict=True)
            if token_id in self._control_ids
        ]
        if place_id is not None:
            found += [(*match.span(), place_id) for match in re.finditer(self.place, text)]
        return sorted(found)

    def _alias(self, spelled: str, hidden: list[str]) -> str:
        hidden.append(spelled)
        return f"{self._secret}h{len(hidden) - 1}e"

    def _revealed(self, text: str, hidden: list[str]) -> str:
        return self._aliases.sub(lambda found: hidden[int(found[1])], text)

    def _encode(self, backend: Backend, text: str) -> Any:
        return backend.encode(text, add_special_tokens=False)

    def _without_control_tokens(self) -> Backend:
        with self._lock:
            if self._plain is None:
                plain = Backend.from_str(self._backend.to_str())
                plain.encode_special_tokens = True
                plain.add_tokens([AddedToken(self._split, normalized=False, special=False)])
                self._plain = plain
            return self._plain
