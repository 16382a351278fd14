"""A request's life in the engine, and the unit of work.

Owns: Sequence (mutable, one per Request), Chunk ("compute these positions now") and Plan (one step's chunks).
Must not know: torch, policies, features.
Invariants: 0 <= num_computed <= len(token_ids); blocks cover every computed position; keys name full blocks only.

    token_ids   [ prompt ........................ | generated ... ]
                 0        num_cached  num_computed            len
                 |-- hit --|-- computed --|-- to compute: the gap a step closes --|

Decode is a gap of 1. A prefix hit starts with num_computed > 0. Preemption sets num_computed back to 0.
"""

from dataclasses import dataclass, field

from izh.request import Request


class Sequence:
    """The life of one Request: its tokens, how many of them have their KV computed, and where that KV lies."""

    __slots__ = (
        "blocks",
        "first_scheduled_s",
        "keys",
        "num_cached",
        "num_computed",
        "num_prompt",
        "num_reused",
        "rank",
        "request",
        "token_ids",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.num_cached = 0  # positions whose KV was found in the prefix cache: never written again
        self.num_reused = 0  # num_cached at first admission: what usage reports
        self.blocks: list[int] = []  # block_table: position p lies in blocks[p // block_size]
        self.keys: list[bytes] = []  # chained key of every full block of token_ids
        self.rank: tuple[float, int] = (request.arrival_s, 0)  # scheduling order, smallest first; set when queued
        self.first_scheduled_s: float | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.num_computed}/{self.num_tokens} computed, {len(self.blocks)} blocks)"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute positions start .. start+count-1 of this sequence now."""

    sequence: Sequence
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def reaches_end(self) -> bool:
        """True when no known token is left to compute: the last row may be sampled or pooled."""
        return self.stop == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work. Holds no tensors."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)
