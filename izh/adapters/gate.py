"""Admission of requests that name adapters.

Owns: the lease: from `open` to `close` a sequence keeps the exact weights it asked for, whatever is loaded, replaced or
unloaded meanwhile; and, from its first chunk on, a hold on the slot where they lie. Preemption changes neither.
Must not know: tensors, kernels, files (it is given a function that finds a request's adapter).
Invariants: every lease and hold is given back once, in `close`; a slot is never reassigned while held.

Fairness. Adapters wait by age: when more are asked for than there are slots, the oldest waiting requests whose adapters
have no place close that many slots to newcomers, those with the fewest holders first. A closed slot drains, since its
holders end and no one joins, so every wait is finite.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from izh.adapters.slots import SlotTable
from izh.adapters.weights import Adapter
from izh.sequence import Chunk, Sequence


@dataclass(slots=True)
class _Lease:
    """One live sequence's adapter; `slot` is None until its first chunk is taken."""

    adapter: Adapter
    slot: int | None = None


class AdapterGate:
    """The Gate (izh/seams.py) of LoRA adapters. `find` gives a request's adapter, None for the base
    model, or raises NotFoundError or RequestError."""

    def __init__(self, slots: SlotTable, find: Callable[[Sequence], Adapter | None]) -> None:
        self._slots = slots
        self._find = find
        self._leases: dict[str, _Lease] = {}  # in order of admission
        self._waiting: dict[str, Sequence] = {}  # leased, no slot yet

    def open(self, sequence: Sequence) -> None:
        adapter = self._find(sequence)
        if adapter is not None:
            self._leases[sequence.id] = _Lease(adapter)
            self._waiting[sequence.id] = sequence
            self._forget_queue()

    def key(self, sequence: Sequence, start: int, stop: int) -> tuple[bytes, ...]:
        lease = self._leases.get(sequence.id)
        return () if lease is None else (b"lora", lease.adapter.digest)

    def grant(self, chunk: Chunk) -> int:
        lease = self._leases.get(chunk.sequence.id)
        if lease is None or lease.slot is not None:
            return chunk.count
        digest = lease.adapter.digest
        if self._is_held(digest):
            num_older = bisect_left(self._queue, chunk.sequence.rank, key=lambda entry: entry[0])
            may_run = self._slots.find(digest) not in self._closed(num_older - self._slots.num_idle)
        else:
            place = next(place for place, (_rank, wanted) in enumerate(self._queue) if wanted == digest)
            may_run = place < self._slots.num_idle
        return chunk.count if may_run else 0

    def take(self, chunk: Chunk) -> None:
        lease = self._leases.get(chunk.sequence.id)
        if lease is not None and lease.slot is None:
            lease.slot = self._slots.take(lease.adapter.digest)
            del self._waiting[chunk.sequence.id]
            self._forget_queue()

    def close(self, sequence: Sequence) -> None:
        lease = self._leases.pop(sequence.id, None)
        if lease is None:
            return
        self._waiting.pop(sequence.id, None)
        if lease.slot is not None:
            self._slots.release(lease.slot)
        self._forget_queue()

    # -- what the stage asks ---------------------------------------------------------------------------

    def slot(self, sequence: Sequence) -> int | None:
        """The slot whose adapter the sequence's rows take; None for the base model."""
        lease = self._leases.get(sequence.id)
        return None if lease is None else lease.slot

    def adapter(self, sequence: Sequence) -> Adapter:
        """The weights that the sequence has leased."""
        return self._leases[sequence.id].adapter

    @property
    def num_live(self) -> int:
        """Leases not given back yet."""
        return len(self._leases)

    def _forget_queue(self) -> None:
        self.__dict__.pop("_queue", None)

    def _is_held(self, digest: bytes) -> bool:
        slot = self._slots.find(digest)
        return slot is not None and self._slots.holds(slot) > 0

    @cached_property
    def _queue(self) -> list[tuple[tuple[float, int], bytes]]:
        """Adapters that are waited for and in no held slot, each with its oldest waiter's rank, oldest first. Kept
        until a sequence comes, gets its slot, or goes."""
        first: dict[bytes, tuple[float, int]] = {}
        for sequence in self._waiting.values():
            digest = self._leases[sequence.id].adapter.digest
            if not self._is_held(digest):
                first[digest] = min(first.get(digest, sequence.rank), sequence.rank)
        return sorted((rank, digest) for digest, rank in first.items())

    def _closed(self, count: int) -> set[int]:
        """The `count` held slots with the fewest holders."""
        held = [slot for slot in range(self._slots.capacity) if self._slots.holds(slot)]
        return set(sorted(held, key=lambda slot: (self._slots.holds(slot), slot))[: max(count, 0)])
