"""Admission of a request that samples.

Owns: the check of its parameters, and of the wish itself, against the model. Holds nothing, delays nothing, changes no
cache key.
"""

from izh.errors import RequestError
from izh.request import SamplingParams
from izh.sampling.check import check_params
from izh.seams import Gate
from izh.sequence import Sequence


class SamplingGate(Gate):
    """The Gate (izh/seams.py) of text generation."""

    def __init__(self, vocab_size: int, has_lm_head: bool) -> None:
        self._vocab_size = vocab_size
        self._has_lm_head = has_lm_head

    def open(self, sequence: Sequence) -> None:
        params = sequence.request.params
        if not isinstance(params, SamplingParams):
            return
        if not self._has_lm_head:
            raise RequestError(
                "this model embeds and cannot generate: its checkpoint has no LM head; ask it for embeddings", "model"
            )
        check_params(params, self._vocab_size)
