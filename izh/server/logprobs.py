"""Log-probabilities as the API's two routes, and vLLM's extension, write them.

Owns: the three shapes, what a token looks like in them, and where a token begins in the text.
Must not know: requests, streams.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from izh.outputs import CompletionOutput
from izh.request import TokenLogprobs
from izh.text.tokenizer import Tokenizer

_IMPOSSIBLE = -9999.0  # the API's stand-in for minus infinity, which JSON cannot write


def chat_logprobs(tokenizer: Tokenizer, output: CompletionOutput) -> dict[str, Any] | None:
    """What chat says of each token: its text, its bytes, and the alternatives."""
    if output.logprobs is None:
        return None

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = tokenizer.piece(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        token(entry.token_id, entry.logprob) | {"top_logprobs": [token(*each) for each in entry.top]}
        for entry in output.logprobs
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: list[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """One object per prompt token, from token id to its log-probability, rank and text (vLLM's form): the actual token
    and the `num_top` most likely. None for the first."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.piece(token_id)[0]}
            for token_id, logprob, rank in _ranked(entry, num_top)
        }
        for entry in entries
    ]


class TokenLists:
    """The parallel lists of /v1/completions for one choice, piece by piece.

    `text_offset` is the place of a token's first character in the choice's text; tokens that share a character have
    the same one. `hidden` tokens (special ones that are left out of the text) take no place.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        # Counts characters of tokens that each may hold only a part of one.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, text: str, token_ids: list[int], entries: list[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """The lists of an echoed prompt. Tokens that the tokenizer put before the text begin where it begins."""
        width = len(b"".join(self._tokenizer.piece(token_id)[1] for token_id in token_ids).decode("utf-8", "replace"))
        self._offset = len(text) - width
        return self._lists(list(zip(token_ids, entries, strict=True)), hidden=frozenset())

    def answer(self, entries: Sequence[TokenLogprobs], hidden: frozenset[int]) -> dict[str, list[Any]]:
        """The lists of newly generated tokens."""
        return self._lists([(entry.token_id, entry) for entry in entries], hidden)

    def _lists(
        self, entries: Sequence[tuple[int, TokenLogprobs | None]], hidden: frozenset[int]
    ) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in entries:
            text, raw = self._tokenizer.piece(token_id)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._top(entry))
            lists["text_offset"].append(max(self._offset, 0))
            if token_id not in hidden:
                self._offset += len(self._characters.decode(raw))
        return lists

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the actual one if it is not among them (as the API has it)."""
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]:
            top.setdefault(self._tokenizer.piece(token_id)[0], _finite(logprob))
        return top


def _ranked(entry: TokenLogprobs, num_top: int) -> list[tuple[int, float, int]]:
    """(token id, logprob, rank): the actual token, then the likely ones."""
    top = [(token_id, _finite(logprob), rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
    actual = (entry.token_id, _finite(entry.logprob), entry.rank)
    return [actual, *(each for each in top if each[0] != entry.token_id)]


def _finite(logprob: float) -> float:
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE  # also for NaN, which no comparison is true of
