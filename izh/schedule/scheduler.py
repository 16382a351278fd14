"""Who runs next, with how many tokens, in which blocks.

Owns: the waiting queue, the running list, every sequence's blocks, and the order of all of these.
Must not know: tensors, models, what a feature is (gates are asked, never inspected).
Invariants: a sequence is waiting, running, or gone; only running ones hold blocks; a running one holds blocks for all
its known tokens; every gate is closed exactly once for a sequence.

      add --> waiting --admit--> running --close--> gone
                 ^                  |
                 +---- preempt -----+      (blocks go back, the gates' holds stay; recomputed later, prefix hits first)

Order: by `rank` = arrival + priority * priority_step_s, smallest first. A rank never changes, so in time each request
goes before every newcomer of any priority: nothing starves.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.sequence import Chunk, Plan, Sequence

if TYPE_CHECKING:
    from izh.seams import Gate


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one step may hold. max_num_batched_tokens >= max_num_seqs, so that each running sequence can advance."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    prefix_caching: bool = True
    priority_step_s: float = 10.0

    def __post_init__(self) -> None:
        assert 1 <= self.max_num_seqs <= self.max_num_batched_tokens
        assert self.block_size >= 1


@dataclass(slots=True)
class Counts:
    """Running totals, for metrics."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preempted: int = 0


class Scheduler:
    """plan() says what to compute; commit(plan) records that it was computed; close(sequence) ends a sequence."""

    def __init__(self, limits: Limits, pool: BlockPool, keys: BlockKeys, gates: tuple[Gate, ...] = ()) -> None:
        self.limits = limits
        self.counts = Counts()
        self._pool = pool
        self._keys = keys
        self._gates = gates
        self._waiting: list[tuple[tuple[float, int], Sequence]] = []  # heap by rank
        self._running: list[Sequence] = []  # sorted by rank
        self._pending: dict[bytes, Sequence] = {}  # blocks being computed now: key -> the sequence that computes it
        self._live: dict[str, Sequence] = {}
        self._num_added = 0

    # -- arrivals and departures ------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that the gates have opened. Its id must not be live."""
        assert sequence.id not in self._live, f"request id {sequence.id!r} is already live"
        request = sequence.request
        sequence.rank = (request.arrival_s + request.priority * self.limits.priority_step_s, self._num_added)
        self._num_added += 1
        self._live[sequence.id] = sequence
        self._keys.extend(sequence)
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence with this id, if any. Pure."""
        return self._live.get(request_id)

    def close(self, sequence: Sequence) -> None:
        """End a live sequence, wherever it is, and return all it holds. The one place where a life ends."""
        del self._live[sequence.id]
        if sequence in self._running:
            self._running.remove(sequence)
            self._free_blocks(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
        for gate in self._gates:
            gate.close(sequence)

    # -- one step ---------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Choose this step's chunks: running sequences first, oldest first, then whoever fits of the waiting."""
        for gate in self._gates:
            gate.turn()
        plan = Plan()
        budget = self._plan_running(plan, self.limits.max_num_batched_tokens)
        if not plan.preempted:
            self._plan_waiting(plan, budget)
        return plan

    def commit(self, plan: Plan) -> None:
        """Record that the plan's chunks were computed: their full blocks can be found from now on."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            first = sequence.num_computed // self.limits.block_size
            sequence.num_computed = chunk.stop
            if self.limits.prefix_caching:
                self._publish(sequence, first)

    def _plan_running(self, plan: Plan, budget: int) -> int:
        """Continue every running sequence: each is sure of one token, the oldest get the rest. Returns what is left."""
        for index, sequence in enumerate(tuple(self._running)):
            if sequence in plan.preempted:
                continue
            if not self._grow(sequence, plan):
                continue
            after = len(self._running) - index - 1  # who was preempted meanwhile stood behind
            budget -= self._take(sequence, budget - after, plan)
        return budget

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Give a running sequence blocks for all its tokens, preempting the youngest if it must. False: it was the
        youngest itself."""
        missing = self._blocks_for(sequence.num_tokens) - len(sequence.blocks)
        while missing > self._pool.num_free:
            victim = self._running[-1]
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self._pool.allocate(missing)
        return True

    def _plan_waiting(self, plan: Plan, budget: int) -> None:
        """Admit in order of rank. A sequence that a gate or a block in the making holds back is passed over; one that
        lacks memory stops the line, so that the memory it needs is not taken by younger ones."""
        passed: list[tuple[tuple[float, int], Sequence]] = []
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_num_seqs:
            entry = heapq.heappop(self._waiting)
            sequence = entry[1]
            hits = self._hits(sequence)
            if self._next_is_pending(sequence, hits):
                passed.append(entry)
                continue
            needed = self._blocks_for(sequence.num_tokens) - len(hits)
            if needed > self._pool.num_free - self._pool.num_idle(hits):
                passed.append(entry)
                break
            if self._granted(self._chunk(sequence, self._start(sequence, hits), budget)) == 0:
                passed.append(entry)
                continue
            self._admit(sequence, hits, needed)
            budget -= self._take(sequence, budget, plan)
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _admit(self, sequence: Sequence, hits: list[int], needed: int) -> None:
        size = self.limits.block_size
        self._pool.share(hits)  # before allocate, which could reuse them
        sequence.blocks = hits + self._pool.allocate(needed)
        sequence.num_cached = len(hits) * size
        sequence.num_computed = self._start(sequence, hits)
        if self.limits.prefix_caching:
            for key in sequence.keys[len(hits) :]:
                self._pending.setdefault(key, sequence)
            self.counts.prefix_query_tokens += sequence.num_tokens
            self.counts.prefix_hit_tokens += sequence.num_computed
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = time.monotonic()
            sequence.num_reused = sequence.num_computed
        self._running.append(sequence)
        self._running.sort(key=lambda each: each.rank)

    def _take(self, sequence: Sequence, limit: int, plan: Plan) -> int:
        """Put a chunk of at most `limit` tokens into the plan, as far as the gates grant. Returns its tokens."""
        chunk = self._chunk(sequence, sequence.num_computed, limit)
        count = self._granted(chunk)
        if count == 0:
            return 0
        chunk = self._chunk(sequence, sequence.num_computed, count)
        for gate in self._gates:
            gate.take(chunk)
        plan.chunks.append(chunk)
        return count

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free_blocks(sequence)
        sequence.num_computed = sequence.num_cached = 0
        heapq.heappush(self._waiting, (sequence.rank, sequence))
        self.counts.num_preempted += 1

    # -- small questions (pure) and block bookkeeping ------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _chunk(self, sequence: Sequence, start: int, limit: int) -> Chunk:
        return Chunk(sequence, start, min(sequence.num_tokens - start, limit))

    def _start(self, sequence: Sequence, hits: list[int]) -> int:
        """First position to compute: after the hits, but at least the last token, whose hidden row is needed."""
        return min(len(hits) * self.limits.block_size, sequence.num_tokens - 1)

    def _granted(self, chunk: Chunk) -> int:
        return min((gate.grant(chunk) for gate in self._gates), default=chunk.count)

    def _hits(self, sequence: Sequence) -> list[int]:
        if not self.limits.prefix_caching or sequence.request.params.needs_every_row:
            return []
        return self._pool.find(sequence.keys)

    def _next_is_pending(self, sequence: Sequence, hits: list[int]) -> bool:
        """True when another sequence is computing the very block this one needs next: wait a step, then share it."""
        if sequence.request.params.needs_every_row or len(hits) == len(sequence.keys):
            return False
        return sequence.keys[len(hits)] in self._pending

    def _publish(self, sequence: Sequence, first: int) -> None:
        self._keys.extend(sequence)
        for index in range(first, sequence.num_computed // self.limits.block_size):
            key = sequence.keys[index]
            self._pool.publish(sequence.blocks[index], key)
            if self._pending.get(key) is sequence:
                del self._pending[key]

    def _free_blocks(self, sequence: Sequence) -> None:
        for key in sequence.keys:
            if self._pending.get(key) is sequence:
                del self._pending[key]
        self._pool.release(sequence.blocks)
        sequence.blocks = []

    # -- what others may ask ------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def live(self) -> tuple[Sequence, ...]:
        return tuple(self._live.values())

    @property
    def kv_usage(self) -> float:
        """Share of blocks held by live sequences, 0..1."""
        return self._pool.num_held / self._pool.num_blocks

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far will be found again; running sequences keep their blocks."""
        self._pool.forget_all()

    def check(self) -> None:
        """Assert the invariants. For tests."""
        self._pool.check()
        waiting = [sequence for _, sequence in self._waiting]
        assert {s.id for s in waiting} | {s.id for s in self._running} == set(self._live)
        assert len(waiting) + len(self._running) == len(self._live)
        assert self._running == sorted(self._running, key=lambda each: each.rank)
        assert all(not s.blocks and s.num_computed == 0 for s in waiting)
        held: dict[int, int] = {}
        for sequence in self._running:
            assert 0 <= sequence.num_computed <= sequence.num_tokens
            assert len(sequence.blocks) * self.limits.block_size >= sequence.num_computed
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for block in sequence.blocks:
                held[block] = held.get(block, 0) + 1
        assert held == {b: n for b, n in enumerate(self._pool.holders) if n}
        assert all(owner in self._running for owner in self._pending.values())
        assert len(self._running) <= self.limits.max_num_seqs
