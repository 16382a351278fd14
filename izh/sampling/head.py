"""The Head of text generation: hidden rows in, one token per sequence out.

Owns: which rows are wanted, the state of each sequence, and the order of the pass: raw logprobs -> edits and penalties
(`penalties.py`) -> greedy or draw (`Ops.draw`) -> stop rule (`stop.py`).
Must not know: models, scheduling, text.
Invariant: a sequence's tokens depend on its own logits, parameters and stream alone; what is kept for it goes in
`forget`.
"""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from izh.kernels.ops import Ops
from izh.request import Finish, SamplingParams, TokenLogprobs
from izh.sampling.filters import filters_of
from izh.sampling.logprobs import PromptLogprobs, token_logprobs
from izh.sampling.penalties import add_bias, forbid, penalize
from izh.sampling.state import SamplingState
from izh.sampling.stop import finish_after
from izh.sampling.uniform import Uniforms
from izh.seams import HiddenRows, Result
from izh.sequence import Chunk, Plan, Sequence

_MAX_PROMPT_LOGITS = 1 << 23  # elements of logits alive at once while a prompt is scored: 32 MiB


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a chunk is asked for: the rows at `scored` positions, then its last row if it reaches the end."""

    chunk: Chunk
    state: SamplingState
    scored: range


@dataclass(frozen=True, slots=True)
class _Row:
    """One token to choose. `index` is its row of `hidden`."""

    sequence: Sequence
    state: SamplingState
    index: int


class SamplingHead:
    """Implements Head (izh/seams.py) for the sequences whose parameters are SamplingParams."""

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        ops: Ops,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        """`logits` maps hidden rows [N, D] to a fresh tensor [N, vocab_size], which the head may overwrite."""
        self._logits = logits
        self._ops = ops
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._uniforms = Uniforms()
        self._states: dict[Sequence, SamplingState] = {}

    def rows(self, plan: Plan) -> list[int]:
        rows: list[int] = []
        for offset, wanted in self._wanted(plan):
            rows += [offset + position - wanted.chunk.start for position in wanted.scored]
            if wanted.chunk.reaches_end:
                rows.append(offset + wanted.chunk.count - 1)
        return rows

    @torch.inference_mode()
    def finish(self, plan: Plan, hidden: HiddenRows) -> list[Result]:
        """A Result with one token for each chunk that reaches its sequence's end. Where logits are not finite, that
        sequence gets an error Finish instead, and no other is disturbed."""
        results: list[Result] = []
        rows: list[_Row] = []
        index = 0
        for _, wanted in self._wanted(plan):
            sequence, prompt = wanted.chunk.sequence, wanted.state.prompt
            if prompt is not None:
                self._score(prompt, wanted, hidden, range(index, index + len(wanted.scored)))
                index += len(wanted.scored)
            if prompt is not None and not prompt.is_finite:
                results.append(Result(sequence, finish=_not_finite(sequence, "its prompt")))
            elif wanted.chunk.reaches_end:
                rows.append(_Row(sequence, wanted.state, index))
            index += wanted.chunk.reaches_end
        return results + self._choose(rows, hidden) if rows else results

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def _wanted(self, plan: Plan) -> Iterator[tuple[int, _Wanted]]:
        """What each sampling chunk is asked for, with the chunk's offset in the step's flat token axis."""
        offset = 0
        for chunk in plan.chunks:
            params = chunk.sequence.request.params
            if isinstance(params, SamplingParams):
                state = self._state(chunk.sequence, params)
                yield offset, _Wanted(chunk, state, range(0) if state.prompt is None else state.prompt.wanted(chunk))
            offset += chunk.count

    def _state(self, sequence: Sequence, params: SamplingParams) -> SamplingState:
        state = self._states.get(sequence)
        if state is None:
            state = SamplingState.of(sequence, params, self._vocab_size, self._eos_token_ids)
            self._states[sequence] = state
        return state

    def _score(self, prompt: PromptLogprobs, wanted: _Wanted, hidden: HiddenRows, scored: range) -> None:
        """Fill in what the rows say of the prompt tokens that follow them, a few rows at a time."""
        followers = wanted.chunk.sequence.token_ids[wanted.scored.start + 1 : wanted.scored.stop + 1]
        step = max(1, _MAX_PROMPT_LOGITS // self._vocab_size)
        for first in range(0, len(scored), step):
            logits = self._raw_logits(hidden, scored[first : first + step])
            prompt.fill(logits, followers[first : first + step])

    def _raw_logits(self, hidden: HiddenRows, index: Many[int]) -> Tensor:
        logits = self._logits(hidden.take(index)).float()
        assert logits.shape == (len(index), self._vocab_size), f"logits {tuple(logits.shape)}"
        return logits

    def _choose(self, rows: list[_Row], hidden: HiddenRows) -> list[Result]:
        rows.sort(key=lambda row: not row.state.is_greedy)
        logits = self._raw_logits(hidden, [row.index for row in rows])
        reported = [i for i, row in enumerate(rows) if row.state.params.logprobs is not None]
        raw = logits[torch.tensor(reported, device=logits.device)] if reported else None

        _edit(logits, rows)
        peak, tokens = self._ops.first_max(logits)
        first = sum(row.state.is_greedy for row in rows)
        if first < len(rows):
            tokens[first:] = self._drawn(logits[first:], peak[first:], rows[first:])

        token_ids, is_finite = tokens.tolist(), [math.isfinite(each) for each in peak.tolist()]
        logprobs: dict[int, TokenLogprobs | None] = {}
        if raw is not None:
            num_top = [rows[i].state.params.logprobs or 0 for i in reported]
            entries = token_logprobs(raw, [token_ids[i] for i in reported], num_top)
            logprobs = dict(zip(reported, entries, strict=True))
        return [
            self._result(row, token_ids[i], logprobs.get(i))
            if is_finite[i]
            else Result(
                row.sequence, finish=_not_finite(row.sequence, f"answer token {row.sequence.num_generated + 1}")
            )
            for i, row in enumerate(rows)
        ]

    def _drawn(self, logits: Tensor, peak: Tensor, rows: list[_Row]) -> Tensor:
        uniform = torch.tensor(
            [self._uniforms.at(row.state.key, row.sequence.num_generated) for row in rows],
            dtype=torch.float64,
            device=logits.device,
        )
        filters = filters_of([row.state.params for row in rows], self._vocab_size, logits.device)
        return self._ops.draw(logits, peak, filters, uniform)

    def _result(self, row: _Row, token_id: int, logprobs: TokenLogprobs | None) -> Result:
        prompt, row.state.prompt = row.state.prompt, None
        return Result(
            row.sequence,
            token_ids=[token_id],
            finish=finish_after(row.sequence, row.state.params, token_id, self._eos_token_ids, self._max_model_len),
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=None if prompt is None else prompt.entries,
        )


def _edit(logits: Tensor, rows: list[_Row]) -> None:
    """Whatever changes single logits, in vLLM's order. Modifies `logits`; costs nothing when no row asks for it."""
    early = [
        (i, row.state.ending_ids)
        for i, row in enumerate(rows)
        if row.state.ending_ids is not None and row.sequence.num_generated < row.state.params.min_tokens
    ]
    forbid(logits, [i for i, _ in early], [ids for _, ids in early])
    biased = [(i, row.state.bias) for i, row in enumerate(rows) if row.state.bias is not None]
    add_bias(logits, [i for i, _ in biased], [ids for _, (ids, _) in biased], [bias for _, (_, bias) in biased])
    penalized = [(i, row, row.state.seen) for i, row in enumerate(rows) if row.state.seen is not None]
    for _, row, seen in penalized:
        seen.read(row.sequence.token_ids)
    penalize(
        logits,
        [i for i, _, _ in penalized],
        [seen for _, _, seen in penalized],
        [row.state.params for _, row, _ in penalized],
    )


def _not_finite(sequence: Sequence, where: str) -> Finish:
    message = (
        f"the model's logits for {where} are not finite (NaN or infinity) in request {sequence.id!r}: its weights, "
        "adapter or images may be damaged, or the dtype's range too small; try dtype fp32"
    )
    return Finish(reason="error", error=message, kind="StepError")
