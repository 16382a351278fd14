"""Log-probabilities of tokens, from the distribution before temperature, filters and penalties.

Owns: how they are computed for rows of raw logits, and PromptLogprobs, which gathers a prompt's over its chunks.
Must not know: how a token was chosen.
Invariant: position i >= 1 of a prompt gets the logprob of its token given those before it, once, whatever the chunks.
"""

import torch
from torch import Tensor

from izh.request import MAX_LOGPROBS, TokenLogprobs
from izh.sampling.blocks import top_candidates
from izh.sequence import Chunk


def token_logprobs(raw: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs | None]:
    """One entry per row of `raw` [R, V] float32: token_ids[i] with its rank, and the num_top[i] most likely.

    An entry is None where the token lies outside the vocabulary (a placeholder of another modality has no
    probability). Ties among the most likely: lowest id first.
    """
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=raw.device)
    inside = (tokens >= 0) & (tokens < raw.shape[1])
    chosen = raw.gather(1, tokens.where(inside, 0)[:, None])
    norm = raw.logsumexp(dim=1, keepdim=True)
    # Always the same number of candidates: how many others ask for must not decide which of a tie are listed.
    top, ids = top_candidates(raw, MAX_LOGPROBS)
    ids, by_id = ids.sort(dim=1)
    top, by_value = top.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, by_value)

    better = (top > chosen).sum(1)
    unlisted = (better == top.shape[1]).nonzero()[:, 0]
    if len(unlisted):
        better[unlisted] = (raw[unlisted] > chosen[unlisted]).sum(1)

    rows = zip(
        token_ids,
        inside.tolist(),
        (chosen - norm)[:, 0].tolist(),
        better.tolist(),
        ids.tolist(),
        (top - norm).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token, logprob, above + 1, list(zip(row_ids[:k], row_top[:k], strict=True))) if ok else None
        for token, ok, logprob, above, row_ids, row_top, k in rows
    ]


class PromptLogprobs:
    """The logprobs of one prompt, filled row by row from the front: row p (0-based) says what token p + 1 was worth.

    A recomputed chunk asks for no row that is already here, so that nothing is computed or delivered twice.
    """

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self.num_top = num_top
        self.is_finite = True
        self.entries: list[TokenLogprobs | None] = [None]
        self._num_rows = num_prompt - 1

    def wanted(self, chunk: Chunk) -> range:
        """The positions of the chunk whose hidden rows are still needed. Pure."""
        num_filled = len(self.entries) - 1
        assert chunk.start <= num_filled or num_filled == self._num_rows, "a prompt position was skipped"
        return range(max(chunk.start, num_filled), min(chunk.stop, self._num_rows))

    def fill(self, raw: Tensor, token_ids: list[int]) -> None:
        """Append the entries of the next len(raw) rows; token_ids[i] is what followed row i."""
        self.is_finite = self.is_finite and bool(raw.amax(dim=1).isfinite().all())
        self.entries += token_logprobs(raw, token_ids, [self.num_top] * len(raw))
