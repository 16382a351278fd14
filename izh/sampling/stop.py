"""When an answer ends, by its token ids.

Owns: the stop rule. Stop strings are found where text exists, in the frontend.
Must not know: torch, logits, how the token was chosen.
Invariant: at most one reason per token; a stop id wins over a length reached by the same token.
"""

from izh.request import Finish, SamplingParams
from izh.sequence import Sequence


def ending_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The token ids that end an answer; none of them may be chosen before `min_tokens` tokens."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def finish_after(
    sequence: Sequence, params: SamplingParams, token_id: int, eos_token_ids: frozenset[int], max_model_len: int
) -> Finish | None:
    """How the answer ends with `token_id`, which is not yet appended to the sequence; None when it goes on."""
    num_generated = sequence.num_generated + 1
    if num_generated >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return Finish(reason="stop")
        if token_id in params.stop_token_ids:
            return Finish(reason="stop", stop_reason=token_id)
    if num_generated == params.max_tokens or sequence.num_tokens + 1 >= max_model_len:
        return Finish(reason="length")
    return None
