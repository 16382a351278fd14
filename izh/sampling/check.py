"""What can only be checked of SamplingParams once the model is known.

Owns: the range of token ids. (Everything else is checked when SamplingParams is made.)
Must not know: torch, sequences. Called by `gate.py` at admission.
"""

from izh.errors import RequestError
from izh.request import SamplingParams


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError when `stop_token_ids` or `logit_bias` names a token id outside 0..vocab_size-1."""
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name} has token id {token_id!r}; this model's ids are the integers 0 to {vocab_size - 1}", name
                )
