"""Admission of a request that samples.

Owns: the check of its parameters, and of the wish itself, against the model. Holds nothing, delays nothing, changes no
cache key.
"""

from izh.errors import RequestError
from izh.request import SamplingParams
from izh.sampling.check import check_params
from izh.sequence import Chunk, Sequence


class SamplingGate:
    """The Gate (izh/seams.py) of text generation."""

    def __init__(self, vocab_size: int, has_lm_head: bool = True) -> None:
        self._vocab_size = vocab_size
        self._has_lm_head = has_lm_head

    def prepare(self, sequence: Sequence) -> None:
        return

    def open(self, sequence: Sequence) -> None:
        params = sequence.request.params
        if not isinstance(params, SamplingParams):
            return
        if not self._has_lm_head:
            raise RequestError(
                "this model embeds and cannot generate: its checkpoint has no LM head; ask it for embeddings", "model"
            )
        check_params(params, self._vocab_size)

    def turn(self) -> None:
        return

    def key(self, sequence: Sequence, start: int, stop: int) -> tuple[bytes, ...]:
        return ()

    def grant(self, chunk: Chunk) -> int:
        return chunk.count

    def take(self, chunk: Chunk) -> None:
        return

    def close(self, sequence: Sequence) -> None:
        return
