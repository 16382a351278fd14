"""What callers may send, checked: the first border of the pooling service.

Owns: the checks of every argument; each refusal is a RequestError with the
numbers in it.
Must not know: encoders, threads, the shape of answers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from izh.errors import ContextLengthError, RequestError
from izh.request import Entry
from izh.text.encoding import Tokens


def check_input(value: Any) -> list[str] | list[list[int]]:
    """A text, texts, token ids or lists of token ids -> texts or lists of ids.

    Raises: RequestError for anything else, and for empty lists.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(_is_id(item) for item in value):
            return [list(value)]
        if all(isinstance(item, (list, tuple)) for item in value):
            for i, item in enumerate(value):
                if not item:
                    raise RequestError(f"input[{i}] is an empty list; it must hold at least 1 token id", "input")
                if not all(_is_id(token) for token in item):
                    raise RequestError(f"input[{i}] must hold token ids, which are integers from 0 on", "input")
            return [list(item) for item in value]
    if isinstance(value, (list, tuple)) and not value:
        raise RequestError("input is an empty list; it must hold at least 1 text", "input")
    raise RequestError("input must be a text, a list of texts, a list of token ids, or a list of such lists", "input")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_count(param: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{param} has {count} entries; this model takes at most {most} in one request", param)


def check_entries(
    param: str,
    entries: Sequence[Entry],
    max_length: int,
    vocab_size: int | None,
    label: Callable[[int], str] | None = None,
) -> None:
    """`label` names an entry by its index; None: as one of `param`.

    Raises: ContextLengthError for a sequence too long, RequestError for an empty one or an id without a token.
    """
    name = label or (lambda i: f"{param}[{i}]")
    for i, entry in enumerate(entries):
        if not entry.ids:
            raise RequestError(f"{name(i)} has no tokens; it must have at least 1", param)
        if len(entry.ids) > max_length:
            raise ContextLengthError(
                f"{name(i)} has {len(entry.ids)} tokens; this model takes at most {max_length}. "
                "Shorten it, or have it cut with truncate_prompt_tokens=-1",
                param,
            )
        if vocab_size is not None and max(entry.ids) >= vocab_size:
            raise RequestError(
                f"{name(i)} has token id {max(entry.ids)}; this model's ids go from 0 to {vocab_size - 1}", param
            )


def check_rerank(query: Any, documents: Any, top_n: Any) -> tuple[str, list[str], int]:
    """(query, documents, how many results). Raises: RequestError naming the argument."""
    if not isinstance(query, str) or not query:
        raise RequestError("query must be a text that is not empty", "query")
    if not isinstance(documents, (list, tuple)) or not documents:
        raise RequestError("documents must be a list of at least 1 text", "documents")
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            raise RequestError(f"documents[{i}] must be a text, not {type(document).__name__}", "documents")
    if top_n is None:
        return query, list(documents), len(documents)
    if not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1:
        raise RequestError(f"top_n must be an integer of at least 1, got {top_n!r}", "top_n")
    return query, list(documents), min(top_n, len(documents))


def check_dimensions(dimensions: Any, allowed: Sequence[int] | None) -> None:
    """`allowed`: see `Recipe.dimensions`. Raises: RequestError."""
    if dimensions is None:
        return
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or dimensions < 1:
        raise RequestError(f"dimensions must be an integer of at least 1, got {dimensions!r}", "dimensions")
    if allowed is None:
        raise RequestError("dimensions: this model was not trained to be cut (matryoshka); leave it out", "dimensions")
    if allowed and dimensions not in allowed:
        raise RequestError(f"dimensions must be one of {', '.join(map(str, allowed))}, got {dimensions}", "dimensions")


def check_truncation(tokens: Any, max_length: int) -> int | None:
    """The length to cut to; None for none. Raises: RequestError."""
    if tokens is None:
        return None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not (tokens == -1 or 1 <= tokens <= max_length):
        raise RequestError(
            f"truncate_prompt_tokens must be -1 (all that this model takes) or between 1 and {max_length}, "
            f"got {tokens!r}",
            "truncate_prompt_tokens",
        )
    return max_length if tokens == -1 else tokens


def choose_prompt(prompts: Mapping[str, str], name: Any, default: str | None) -> str:
    """The text that goes before each input. Raises: RequestError for a name that the model does not have."""
    if name is None:
        return "" if default is None else prompts[default]
    if not isinstance(name, str) or name not in prompts:
        raise RequestError(
            f"prompt_name {name!r} is not known; this model has {', '.join(prompts) or 'no prompts'}", "prompt_name"
        )
    return prompts[name]


def entry_of(encoded: Any, is_scored: bool = False) -> Entry:
    """What a tokenizer gave for a text or pair: ids, or (ids, type ids)."""
    if isinstance(encoded, Tokens) or (isinstance(encoded, tuple) and encoded and not isinstance(encoded[0], int)):
        ids, type_ids = encoded
        return Entry(list(ids), None if type_ids is None else list(type_ids), is_scored=is_scored)
    return Entry([int(token) for token in encoded], is_scored=is_scored)
