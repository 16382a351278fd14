"""Admission of a request that is pooled.

Owns: the check of its parameters against the model. Holds nothing, delays nothing, changes no cache key.
Must not know: tensors, encoders, HTTP.
Invariant: whether cached blocks may be read is said by `PoolingParams.needs_every_row`, which the scheduler asks:
"last" reads the last row alone, which is always computed; all other modes need rows that a hit would leave out.
"""

from izh.errors import RequestError
from izh.request import PoolingParams
from izh.seams import Gate
from izh.sequence import Sequence


class PoolingGate(Gate):
    """The Gate (izh/seams.py) of pooling."""

    def __init__(self, vocab_size: int, has_lm_head: bool) -> None:
        self._vocab_size = vocab_size
        self._has_lm_head = has_lm_head

    def open(self, sequence: Sequence) -> None:
        params = sequence.request.params
        if not isinstance(params, PoolingParams) or not params.logit_ids:
            return
        if not self._has_lm_head:
            raise RequestError("logit_ids: this checkpoint has no LM head, so it has no logits to tell", "logit_ids")
        for token_id in params.logit_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"logit_ids has token id {token_id}; this model's ids are 0 to {self._vocab_size - 1}", "logit_ids"
                )
