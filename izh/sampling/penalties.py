"""What changes single logits before a token is chosen: logit bias, min_tokens, penalties.

Owns: TokenCounts (which tokens a sequence holds) and the three edits. The head applies them in vLLM's order: `forbid`
(ids that would end the answer too early), `add_bias`, `penalize`.
Must not know: how a token is chosen.
Invariant: each edit touches only the ids it names; no state is as wide as the vocabulary.
"""

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from izh.request import SamplingParams


class TokenCounts:
    """The distinct tokens of one sequence, each with how often the answer holds it. Grows as the answer grows."""

    def __init__(self, prompt_token_ids: Many[int], num_prompt: int, vocab_size: int) -> None:
        """`prompt_token_ids` are those that count as seen: the prompt, or none when only the answer is penalized."""
        seen = np.unique(np.asarray(prompt_token_ids, np.int64))
        seen = seen[(seen >= 0) & (seen < vocab_size)]  # a placeholder of another modality may lie outside
        self._num_ids = len(seen)
        self._ids = np.resize(seen, max(64, 2 * len(seen))) if len(seen) else np.zeros(64, np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._place = {token_id: place for place, token_id in enumerate(seen.tolist())}
        self._num_read = num_prompt

    @property
    def ids(self) -> np.ndarray:
        """[n] int64, distinct."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> np.ndarray:
        """[n] float32: occurrences of `ids` in the answer; 0 for one that only the prompt holds."""
        return self._counts[: self._num_ids]

    def read(self, token_ids: list[int]) -> None:
        """Count what the sequence has gained since the last call."""
        for token_id in token_ids[self._num_read :]:
            place = self._place.setdefault(token_id, self._num_ids)
            if place == self._num_ids:
                self._append(token_id)
            self._counts[place] += 1.0
        self._num_read = len(token_ids)

    def _append(self, token_id: int) -> None:
        if self._num_ids == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._num_ids] = token_id
        self._num_ids += 1


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def forbid(logits: Tensor, rows: Many[int], ids: Many[np.ndarray]) -> None:
    """logits[rows[i], ids[i]] = -inf. Modifies `logits` [N, V]."""
    if rows:
        logits.view(-1)[_flat(logits, rows, ids)] = -torch.inf


def add_bias(logits: Tensor, rows: Many[int], ids: Many[np.ndarray], bias: Many[np.ndarray]) -> None:
    """logits[rows[i], ids[i]] += bias[i]. Modifies `logits` [N, V]."""
    if rows:
        logits.view(-1)[_flat(logits, rows, ids)] += torch.from_numpy(np.concatenate(bias)).to(logits.device)


def penalize(logits: Tensor, rows: Many[int], seen: Many[TokenCounts], params: Many[SamplingParams]) -> None:
    """For each token that `seen[i]` holds, c times in the answer:
    x = x / repetition_penalty if x > 0 else x * repetition_penalty, then
    x = x - frequency_penalty * c - presence_penalty * [c > 0].

    Modifies `logits` [N, V]. Source: Keskar et al., CTRL (2019), section 4.1, with the sign rule of transformers and
    vLLM; OpenAI API reference for the other two.
    """
    if not rows:
        return
    sizes = [len(each.ids) for each in seen]
    columns = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], np.float32)
    table = np.concatenate([np.repeat(columns, sizes, axis=0).T, [np.concatenate([each.counts for each in seen])]])
    repetition, frequency, presence, counts = torch.from_numpy(table).to(logits.device)
    flat, where = logits.view(-1), _flat(logits, rows, [each.ids for each in seen])
    x = flat[where]
    x = torch.where(x > 0, x / repetition, x * repetition)
    flat[where] = x - frequency * counts - presence * (counts > 0)


def _flat(logits: Tensor, rows: Many[int], ids: Many[np.ndarray]) -> Tensor:
    """Indices into logits.view(-1)."""
    vocab_size = logits.shape[1]
    flat = np.concatenate([each + row * vocab_size for row, each in zip(rows, ids, strict=True)])
    return torch.from_numpy(flat).to(logits.device)
