"""The three narrow faces through which a feature touches the engine, and nowhere else.

Owns: Gate (held by the scheduler), Stage and Head (held by the runner), HiddenRows and Result, a head's two sides.
Must not know: any feature. `engine/build.py` alone decides which ones exist.
"""

from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from izh.batch import Batch
from izh.request import Finish, TokenLogprobs
from izh.sequence import Chunk, Plan, Sequence


class Gate(Protocol):
    """A feature's word on admission and on what a cached block means. Host only: no tensors are computed here.

    What a feature does not say is said here, for who inherits: nothing is fetched, held or delayed, and blocks depend
    on nothing but their tokens."""

    def prepare(self, sequence: Sequence) -> Future[Any] | None:
        """Called first. What must be fetched before `open` (from a disk, say), or None if nothing; other requests run
        on meanwhile. Raises RequestError, holding nothing."""
        return None

    def open(self, sequence: Sequence) -> None:
        """Validate and annotate once, before the length check and before KV is reserved. May rewrite `token_ids`
        (an image placeholder becomes many). Raises RequestError; `close` follows."""
        return

    def turn(self) -> None:
        """A step is about to be planned: the time to decide whose turn it is, if not all can run."""
        return

    def key(self, sequence: Sequence, start: int, stop: int) -> tuple[bytes, ...]:
        """Parts that make the cached block of this span distinct from one with the same tokens; () if none. Pure."""
        return ()

    def grant(self, chunk: Chunk) -> int:
        """How many of the chunk's tokens may run now; 0 means wait. Pure."""
        return chunk.count

    def take(self, chunk: Chunk) -> None:
        """Commit what `grant` allowed: the chunk is in the plan."""
        return

    def close(self, sequence: Sequence) -> None:
        """Return every hold. Called exactly once for each sequence that `prepare` accepted, however it ends."""
        return


class Stage(Protocol):
    """A feature's part of the model inputs."""

    def sync(self, plan: Plan) -> None:
        """Load what the plan's arrivals need (weights into slots, rows onto the device)."""

    def fill(self, plan: Plan, batch: Batch) -> None:
        """Write this feature's channel of `batch` and nothing else."""

    def narrow(self, rows: list[int]) -> None:
        """Only these rows of the step go on into the model, in this order: a head has taken them. To a feature that
        has no part in the LM head it is nothing, which is what who inherits says."""
        return


class HiddenRows:
    """The hidden rows that a head has named. What it takes of them may go on into the model (the LM head), whose
    features have to know which rows those are and in what order: so they are told with each taking."""

    def __init__(self, values: Tensor, rows: list[int], stages: Many[Stage] = ()) -> None:
        """values [len(rows), D]: the rows of the step with these numbers."""
        self.values = values
        self._rows = rows
        self._stages = stages

    def take(self, index: Many[int]) -> Tensor:
        """These of the rows, [len(index), D]. May be `values` itself."""
        rows = [self._rows[i] for i in index]
        for stage in self._stages:
            stage.narrow(rows)
        if rows == self._rows:
            return self.values
        return self.values[torch.tensor(index, device=self.values.device)]


@dataclass(slots=True)
class Result:
    """What a Head concludes for one sequence of the step."""

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)  # appended to the sequence
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: bytes | None = None  # float32, little-endian


class Head(Protocol):
    """A feature's use of the hidden rows."""

    def rows(self, plan: Plan) -> list[int]:
        """Indices into the step's flat token axis of the hidden rows wanted, in order; [] for none."""

    def finish(self, plan: Plan, hidden: HiddenRows) -> list[Result]:
        """Make results from the rows that `rows(plan)` just named."""

    def forget(self, sequence: Sequence) -> None:
        """Drop any state kept for a sequence that has ended, if a head keeps any. Called once for each, also for those
        never run."""
        return
