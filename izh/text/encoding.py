"""Texts for encoders: single texts and pairs, as the checkpoint's own tokenizer marks them.

Owns: EncoderTokenizer, Tokens.
Must not know: torch, prompts, what the ids are for. `transformers` is imported only when a tokenizer is loaded.
Invariant: safe to call from several threads: a tokenizer that cuts is a copy of its own, made once for a length, so
that no call switches what another sees.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import BertNormalizer, Lowercase, Normalizer
from tokenizers.normalizers import Sequence as Normalizers

from izh.errors import ModelLoadError, RequestError

_MAX_CUTTING = 4  # lengths for which a tokenizer is kept: each has a vocabulary of its own


class Tokens(NamedTuple):
    """A text or pair as the model reads it. `type_ids` tell a pair's two parts apart; None where the model has none."""

    ids: list[int]
    type_ids: list[int] | None


class EncoderTokenizer:
    """Text and pairs of texts to token ids."""

    def __init__(self, hf: Any, lower_case: bool = False) -> None:
        """`hf`: a fast tokenizer of `transformers`, which now belongs to this object. `lower_case`: texts are lowered
        before anything else, whether or not the tokenizer does so itself."""
        self._backend: Backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        if lower_case and not _lowers(self._backend.normalizer):
            own = [] if self._backend.normalizer is None else [self._backend.normalizer]
            self._backend.normalizer = Normalizers([Lowercase(), *own])
        self._has_types = "token_type_ids" in hf.model_input_names
        self._side: str = hf.truncation_side
        self._cutting: dict[int, Backend] = {}
        self._lock = threading.Lock()
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.pad_token_id: int | None = hf.pad_token_id
        self.model_max_length: int = hf.model_max_length
        """Longest input in tokens, as the tokenizer's own files say; a huge number where they do not."""
        self.special_ids = frozenset(hf.all_special_ids)

    @classmethod
    def load(cls, directory: Path, lower_case: bool = False) -> "EncoderTokenizer":
        """The tokenizer of a model directory. Raises ModelLoadError."""
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # `tokenizers` raises plain Exception for a malformed file
            raise ModelLoadError(f"cannot load the tokenizer of {directory}: {error}") from error
        if not hf.is_fast:
            raise ModelLoadError(f"the tokenizer of {directory} ({type(hf).__name__}) has no tokenizer.json form")
        return cls(hf, lower_case)

    def encode(self, text: str) -> list[int]:
        """Token ids with the model's special tokens, never cut."""
        return self.encode_many([text])[0].ids

    def encode_pair(self, query: str, document: str) -> Tokens:
        """A pair in the form that the model was trained on, never cut."""
        return self.encode_pairs(query, [document])[0]

    def encode_many(self, texts: Sequence[str], max_length: int | None = None) -> list[Tokens]:
        """Each text; with `max_length` cut to that many tokens, special ones included.

        Raises: RequestError for text that is no valid Unicode.
        """
        return self._encode(list(texts), max_length)

    def encode_pairs(self, query: str, documents: Sequence[str], max_length: int | None = None) -> list[Tokens]:
        """The query with each document; with `max_length` the longer of the two is cut until both fit.

        Raises: RequestError for text that is no valid Unicode.
        """
        return self._encode([(query, document) for document in documents], max_length)

    def cut(self, text: str, max_tokens: int) -> str:
        """The text's beginning, of at most `max_tokens` tokens, special ones not counted."""
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]

    def _encode(self, inputs: list[Any], max_length: int | None) -> list[Tokens]:
        is_pair = bool(inputs) and isinstance(inputs[0], tuple)
        if max_length is not None and max_length <= (own := self._backend.num_special_tokens_to_add(is_pair)):
            raise RequestError(
                f"truncate_prompt_tokens must be above {own}, the special tokens of this model, got {max_length}",
                "truncate_prompt_tokens",
            )
        try:
            encodings = self._tokenizer(max_length).encode_batch(inputs)
        except TypeError as error:  # the library's word for a lone surrogate, which JSON can spell
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error
        return [self._tokens(encoding) for encoding in encodings]

    def _tokens(self, encoding: Encoding) -> Tokens:
        return Tokens(encoding.ids, encoding.type_ids if self._has_types else None)

    def _tokenizer(self, max_length: int | None) -> Backend:
        if max_length is None:
            return self._backend
        with self._lock:
            if max_length not in self._cutting:
                cutting = Backend.from_str(self._backend.to_str())
                cutting.enable_truncation(max_length, strategy="longest_first", direction=self._side)
                if len(self._cutting) == _MAX_CUTTING:
                    del self._cutting[next(iter(self._cutting))]
                self._cutting[max_length] = cutting
            return self._cutting[max_length]


def _lowers(normalizer: Normalizer | None) -> bool:
    if isinstance(normalizer, Normalizers):
        return any(_lowers(normalizer[i]) for i in range(len(normalizer)))
    return isinstance(normalizer, Lowercase) or (isinstance(normalizer, BertNormalizer) and normalizer.lowercase)
