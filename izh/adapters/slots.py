"""Which adapter lies in which device slot, and who still needs it there.

Owns: SlotTable, the one account of slots: what is assigned, how many sequences hold it, which is reused next.
Must not know: tensors, files, names. The gate decides with it, the stage copies what it says.
Invariants: a digest lies in at most one slot; a slot that is held keeps its digest; a hold is given back exactly once.

    empty --assign--> held (n sequences) --release--> idle, still resident --assign another--> held by others
                          ^------------------hold-----------'
"""

from collections import OrderedDict


class SlotTable:
    """`capacity` slots, numbered from 0. Adapters are named by the digest of their effective weights."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._digest: list[bytes | None] = [None] * capacity
        self._slot_of: dict[bytes, int] = {}
        self._holds = [0] * capacity
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity))  # next to be reused first

    def find(self, digest: bytes) -> int | None:
        """The slot where this adapter lies, if any. Pure."""
        return self._slot_of.get(digest)

    def digest(self, slot: int) -> bytes | None:
        """What is assigned to the slot. Pure."""
        return self._digest[slot]

    def holds(self, slot: int) -> int:
        """How many sequences hold the slot. Pure."""
        return self._holds[slot]

    @property
    def num_idle(self) -> int:
        """Slots that nobody holds."""
        return len(self._idle)

    @property
    def num_holds(self) -> int:
        """Holds not given back yet, over all slots."""
        return sum(self._holds)

    def place(self, digest: bytes) -> int:
        """Assign the adapter the idle slot unused for longest, unless it has a slot. Some slot must be idle then."""
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = next(iter(self._idle))
            old = self._digest[slot]
            if old is not None:
                del self._slot_of[old]
            self._digest[slot] = digest
            self._slot_of[digest] = slot
            self._idle.move_to_end(slot)
        return slot

    def take(self, digest: bytes) -> int:
        """Hold the adapter's slot, placing it first if it has none."""
        slot = self.place(digest)
        self._holds[slot] += 1
        self._idle.pop(slot, None)
        return slot

    def release(self, slot: int) -> None:
        """Give one hold back."""
        if self._holds[slot] == 0:
            raise RuntimeError(f"adapter slot {slot} was released more often than it was acquired: this is a bug")
        self._holds[slot] -= 1
        if self._holds[slot] == 0:
            self._idle[slot] = None

    def drop(self, digest: bytes) -> None:
        """Forget an adapter that nobody holds; its slot is the next to be reused."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            assert self._holds[slot] == 0
            self._digest[slot] = None
            self._idle.move_to_end(slot, last=False)

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert all((self._holds[slot] == 0) == (slot in self._idle) for slot in range(self.capacity))
        assert {d: s for s, d in enumerate(self._digest) if d is not None} == self._slot_of
