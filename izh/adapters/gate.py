"""Admission of requests that name adapters.

Owns: the lease: from `prepare` to `close` a sequence keeps the exact weights it asked for, whatever is loaded, replaced
or unloaded meanwhile; and whose turn it is to have a slot on the device. Preemption changes neither.
Must not know: tensors, kernels, files (it is given a function that finds a request's adapter).
Invariants: every lease and hold is given back once, in `close`; a slot is never reassigned while held.

Turns. When more adapters are wanted than there are slots, those without one queue, and those that have had one for
TURN_STEPS steps, or have no use for it, make room: their sequences pause, keep lease and KV, and queue again at the
end. So every wait is finite, first tokens come early, and a change of weights is paid for by many steps.

    wanted --offer--> held (its sequences run) --turn over and others wait--> wanted, at the end of the queue
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

from izh.adapters.slots import SlotTable
from izh.adapters.weights import Adapter
from izh.sequence import Chunk, Sequence

TURN_STEPS = 16


@dataclass(frozen=True, slots=True)
class Loan:
    """What a request asks for: each adapter's name and the digest of what it means now; their sum, once it is made."""

    named: tuple[tuple[str, bytes], ...]
    weights: Future[Adapter]


@dataclass(slots=True)
class _Lease:
    """One live sequence's adapter: None until it is opened. `slot` is None while it waits for one."""

    loan: Loan
    adapter: Adapter | None = None
    slot: int | None = None


class AdapterGate:
    """The Gate (izh/seams.py) of LoRA adapters. `find` gives a request's adapter, None for the base model, or raises
    NotFoundError."""

    def __init__(self, slots: SlotTable, find: Callable[[Sequence], Loan | None]) -> None:
        self._slots = slots
        self._find = find
        self._leases: dict[str, _Lease] = {}
        self._waiting: dict[bytes, set[str]] = {}  # opened and without a slot, by adapter
        self._queue: OrderedDict[bytes, None] = OrderedDict()  # adapters waited for and in no held slot
        self._offered: set[bytes] = set()  # those of the queue that may take an idle slot in this step
        self._passed: set[bytes] = set()  # offered in vain: their sequences wait for something else, such as memory
        self._num_steps = [0] * slots.capacity  # planned since the slot was last taken while idle
        self._ran: set[int] = set()  # slots that the step now planned has a use for

    def prepare(self, sequence: Sequence) -> Future[Adapter] | None:
        loan = self._find(sequence)
        if loan is None:
            return None
        self._leases[sequence.id] = _Lease(loan)
        return None if loan.weights.done() else loan.weights

    def open(self, sequence: Sequence) -> None:
        lease = self._leases.get(sequence.id)
        if lease is not None:
            lease.adapter = lease.loan.weights.result()
            self._wait(sequence.id, lease.adapter.digest)

    def turn(self) -> None:
        for digest in [digest for digest in self._offered if digest in self._queue]:
            self._queue.move_to_end(digest)
            self._passed.add(digest)
        held = [slot for slot in range(self._slots.capacity) if self._slots.holds(slot)]
        for slot in held:
            self._num_steps[slot] += 1
        missing = sum(digest not in self._passed for digest in self._queue) - self._slots.num_idle
        over = [slot for slot in held if slot not in self._ran or self._num_steps[slot] > TURN_STEPS]
        over.sort(key=lambda slot: (slot in self._ran, -self._num_steps[slot]))
        for slot in over[: max(missing, 0)]:
            self._pause(slot)
        self._ran.clear()
        self._offered = set(islice(self._queue, self._slots.num_idle))

    def key(self, sequence: Sequence, start: int, stop: int) -> tuple[bytes, ...]:
        lease = self._leases.get(sequence.id)
        return () if lease is None else (b"lora", _adapter(lease).digest)

    def grant(self, chunk: Chunk) -> int:
        lease = self._leases.get(chunk.sequence.id)
        if lease is None or lease.slot is not None:
            return chunk.count
        digest = _adapter(lease).digest
        return chunk.count if digest in self._offered or self._is_held(digest) else 0

    def take(self, chunk: Chunk) -> None:
        lease = self._leases.get(chunk.sequence.id)
        if lease is None:
            return
        if lease.slot is None:
            digest = _adapter(lease).digest
            lease.slot = self._slots.take(digest)
            if self._slots.holds(lease.slot) == 1:
                self._num_steps[lease.slot] = 0
            self._stop_waiting(chunk.sequence.id, digest)
        self._ran.add(lease.slot)

    def close(self, sequence: Sequence) -> None:
        lease = self._leases.pop(sequence.id, None)
        if lease is None:
            return
        self._passed.clear()  # what the sequence held may be what they waited for
        if lease.slot is not None:
            self._slots.release(lease.slot)
        if lease.adapter is not None:
            self._stop_waiting(sequence.id, lease.adapter.digest)

    # -- what the stage asks ------------------------------------------------------------------------------------------

    def slot(self, sequence: Sequence) -> int | None:
        """The slot whose adapter the sequence's rows take; None for the base model."""
        lease = self._leases.get(sequence.id)
        return None if lease is None else lease.slot

    def adapter(self, sequence: Sequence) -> Adapter:
        """The weights that the sequence has leased."""
        return _adapter(self._leases[sequence.id])

    # -- what others may ask ------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Leases not given back yet."""
        return len(self._leases)

    def num_leases(self, digest: bytes, name: str | None = None) -> int:
        """How many live sequences use these weights, alone or in a sum: by this name, or by any."""
        return sum(
            any(used == digest and name in (None, by) for by, used in lease.loan.named)
            for lease in self._leases.values()
        )

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _wait(self, sequence_id: str, digest: bytes) -> None:
        self._waiting.setdefault(digest, set()).add(sequence_id)
        self._queue_or_not(digest)

    def _stop_waiting(self, sequence_id: str, digest: bytes) -> None:
        waiting = self._waiting.get(digest)
        if waiting is not None:
            waiting.discard(sequence_id)
            if not waiting:
                del self._waiting[digest]
        self._queue_or_not(digest)

    def _queue_or_not(self, digest: bytes) -> None:
        if digest in self._waiting and not self._is_held(digest):
            self._queue.setdefault(digest)
        else:
            self._queue.pop(digest, None)
            self._passed.discard(digest)

    def _pause(self, slot: int) -> None:
        """Take the slot from all who hold it."""
        for sequence_id, lease in self._leases.items():
            if lease.slot == slot:
                lease.slot = None
                self._slots.release(slot)
                self._waiting.setdefault(_adapter(lease).digest, set()).add(sequence_id)
        digest = self._slots.digest(slot)
        assert digest is not None
        self._queue_or_not(digest)

    def _is_held(self, digest: bytes) -> bool:
        slot = self._slots.find(digest)
        return slot is not None and self._slots.holds(slot) > 0


def _adapter(lease: _Lease) -> Adapter:
    assert lease.adapter is not None, "asked before it was opened"
    return lease.adapter
