"""What users of `LLM` and `AsyncLLM` receive.

Owns: RequestOutput and CompletionOutput, and how two of them add up; PoolingOutput, RerankOutput.
Must not know: torch, processes, HTTP.
Invariant: a stream of RequestOutputs, added up in order, equals the one RequestOutput of the unstreamed call.
"""

from dataclasses import dataclass, field

import numpy as np

from izh.request import FinishReason, TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One choice's text, token ids and (when asked for) log-probabilities: all of it, or in a stream what is new.

    `logprobs` has one entry per token id. `stop_reason` is the stop string or token id that ended the choice.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The choices of one request. In a stream each one holds only what is new, and only the choices that moved."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    def add(self, new: "RequestOutput") -> None:
        """Append what `new` brings, choice by choice."""
        mine = {output.index: output for output in self.outputs}
        for piece in new.outputs:
            whole = mine.get(piece.index)
            if whole is None:
                self.outputs.append(piece)
                continue
            whole.text += piece.text
            whole.token_ids = whole.token_ids + piece.token_ids
            if piece.logprobs is not None:
                whole.logprobs = (whole.logprobs or []) + piece.logprobs
            whole.finish_reason = piece.finish_reason or whole.finish_reason
            whole.stop_reason = piece.stop_reason if piece.stop_reason is not None else whole.stop_reason
        self.outputs.sort(key=lambda output: output.index)
        self.finished = self.finished or new.finished
        self.prompt_logprobs = new.prompt_logprobs if new.prompt_logprobs is not None else self.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, new.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What a pooled prompt came to: `vector` is float32, read-only."""

    request_id: str
    prompt_token_ids: list[int]
    vector: np.ndarray
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RerankOutput:
    """A document in its place: its index among those given, and how well it answers the query."""

    index: int
    score: float
    document: str
