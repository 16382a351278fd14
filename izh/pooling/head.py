"""The Heads of pooling: hidden rows in, one vector per sequence out.

Owns: PoolingHead, which pools rows, and LogitsHead, which reads single logits after a prompt's last row.
Must not know: models, scheduling, what a vector is for.
Invariant: a sequence ends with the step that computes its prompt's last row; what is kept for it goes in `forget`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from izh.pooling.running import RunningPool
from izh.request import Finish, PoolingParams
from izh.seams import Head, HiddenRows, Result
from izh.sequence import Chunk, Plan, Sequence


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The rows asked for of a chunk: those to pool, and its last, with which it ends, if that is not among them."""

    chunk: Chunk
    pool: RunningPool
    pooled: range

    @property
    def rows(self) -> list[int]:
        """Positions in the prompt."""
        last = self.chunk.stop - 1
        is_extra = self.chunk.reaches_end and (not self.pooled or self.pooled[-1] != last)
        return [*self.pooled, *([last] if is_extra else [])]


class PoolingHead:
    """Implements Head (izh/seams.py) for the sequences whose parameters are PoolingParams without `logit_ids`."""

    def __init__(self) -> None:
        self._pools: dict[Sequence, RunningPool] = {}

    def rows(self, plan: Plan) -> list[int]:
        return [
            offset + position - wanted.chunk.start for offset, wanted in self._wanted(plan) for position in wanted.rows
        ]

    @torch.inference_mode()
    def finish(self, plan: Plan, hidden: HiddenRows) -> list[Result]:
        results: list[Result] = []
        index = 0
        for _, wanted in self._wanted(plan):
            num_rows = len(wanted.rows)  # before they are taken in
            if wanted.pooled:
                wanted.pool.add(hidden.values[index : index + len(wanted.pooled)])
            index += num_rows
            if wanted.chunk.reaches_end:
                results.append(_result(wanted.chunk.sequence, wanted.pool.vector(hidden.values.shape[1])))
        return results

    def forget(self, sequence: Sequence) -> None:
        self._pools.pop(sequence, None)

    def _wanted(self, plan: Plan) -> Iterator[tuple[int, _Wanted]]:
        """What each pooled chunk is asked for, with the chunk's offset in the step's flat token axis."""
        for offset, chunk, params in _pooled_chunks(plan):
            if params.logit_ids:
                continue
            pool = self._pools.get(chunk.sequence)
            if pool is None:
                pool = self._pools[chunk.sequence] = RunningPool(params, chunk.sequence.num_prompt)
            yield offset, _Wanted(chunk, pool, pool.wanted(chunk.start, chunk.stop))


class LogitsHead(Head):
    """Implements Head (izh/seams.py) for the sequences whose PoolingParams have `logit_ids`."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        """`logits` maps hidden rows [N, D] to [N, vocab size]."""
        self._logits = logits

    def rows(self, plan: Plan) -> list[int]:
        return [offset + chunk.count - 1 for offset, chunk, _ in self._ending(plan)]

    @torch.inference_mode()
    def finish(self, plan: Plan, hidden: HiddenRows) -> list[Result]:
        ending = list(self._ending(plan))
        logits = self._logits(hidden.take(range(len(ending)))).float()
        return [
            _result(chunk.sequence, logits[index, list(params.logit_ids)])
            for index, (_, chunk, params) in enumerate(ending)
        ]

    def _ending(self, plan: Plan) -> Iterator[tuple[int, Chunk, PoolingParams]]:
        return (each for each in _pooled_chunks(plan) if each[2].logit_ids and each[1].reaches_end)


def _pooled_chunks(plan: Plan) -> Iterator[tuple[int, Chunk, PoolingParams]]:
    offset = 0
    for chunk in plan.chunks:
        params = chunk.sequence.request.params
        if isinstance(params, PoolingParams):
            yield offset, chunk, params
        offset += chunk.count


def _result(sequence: Sequence, vector: Tensor) -> Result:
    if not vector.isfinite().all():
        message = (
            f"the model's rows are not finite (NaN or infinity) in request {sequence.id!r}: its weights or adapter may "
            "be damaged, or the dtype's range too small; try dtype fp32"
        )
        return Result(sequence, finish=Finish(reason="error", error=message, kind="StepError"))
    pooled = vector.float().cpu().numpy().astype("<f4", copy=False).tobytes()
    return Result(sequence, pooled=pooled, finish=Finish(reason="stop"))
