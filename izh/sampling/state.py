"""What is kept for one sequence from the first step that names it until it is forgotten.

Owns: SamplingState, the parts of a request's parameters that a step needs, made ready once.
Must not know: logits, devices.
Invariant: nothing here is as wide as the vocabulary; only `seen` and `prompt` ever change.
"""

from dataclasses import dataclass

import numpy as np

from izh.request import SamplingParams
from izh.sampling.logprobs import PromptLogprobs
from izh.sampling.penalties import TokenCounts, has_penalties
from izh.sampling.stop import ending_ids
from izh.sampling.uniform import Key, stream_key
from izh.sequence import Sequence

_GREEDY_BELOW = 1e-5  # a temperature too small to divide by (vLLM's bound)


@dataclass(slots=True)
class SamplingState:
    """`None` where the request asks for no such thing. Id arrays are int64 and hold no id twice."""

    params: SamplingParams
    is_greedy: bool
    key: Key  # of the sequence's random stream
    ending_ids: np.ndarray | None  # not allowed before min_tokens
    bias: tuple[np.ndarray, np.ndarray] | None  # ids, float32 values
    seen: TokenCounts | None  # for penalties
    prompt: PromptLogprobs | None  # until delivered

    @staticmethod
    def of(
        sequence: Sequence, params: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> "SamplingState":
        bias = params.logit_bias
        seen = None
        if has_penalties(params):
            # Only the repetition penalty looks at the prompt.
            counted = sequence.token_ids[: sequence.num_prompt] if params.repetition_penalty != 1.0 else []
            seen = TokenCounts(counted, sequence.num_prompt, vocab_size)
        return SamplingState(
            params=params,
            is_greedy=params.temperature < _GREEDY_BELOW or params.top_k == 1,
            key=stream_key(params.seed, sequence.request.choice),
            ending_ids=np.array(sorted(ending_ids(params, eos_token_ids)), np.int64) if params.min_tokens else None,
            bias=(np.array([*bias], np.int64), np.array([*bias.values()], np.float32)) if bias else None,
            seen=seen,
            prompt=None
            if params.prompt_logprobs is None
            else PromptLogprobs(sequence.num_prompt, params.prompt_logprobs),
        )
