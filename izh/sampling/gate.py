"""Admission of a request that samples.

Owns: the check of its parameters against the model. Holds nothing, delays nothing, changes no cache key.
"""

from izh.request import SamplingParams
from izh.sampling.check import check_params
from izh.sequence import Chunk, Sequence


class SamplingGate:
    """The Gate (izh/seams.py) of text generation."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def prepare(self, sequence: Sequence) -> None:
        return

    def open(self, sequence: Sequence) -> None:
        if isinstance(sequence.request.params, SamplingParams):
            check_params(sequence.request.params, self._vocab_size)

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
