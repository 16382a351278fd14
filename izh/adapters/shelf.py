"""The adapters that this engine knows by name, on the host.

Owns: AdapterShelf: name -> weights within a bound in bytes, and what a request's list of names and scales comes to.
Must not know: slots, the scheduler, files. A sequence that leased weights keeps them, whatever happens here.
Invariants: a name means the same weights until it is put again; weights under several names are kept once; only what
can be read again is evicted.

    put --> in memory --evicted, unused for longest--> known by name, digest, source --read again by find--> in memory

Threads: any may put, pop and ask while another finds. One lock guards the tables and is never held while weights are
checked, hashed, combined or read, so a loader thread delays a find by microseconds.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from izh.adapters.weights import Adapter, combine
from izh.errors import AdapterError, NotFoundError, RequestError
from izh.sequence import Sequence

MAX_COMBINED = 16
"""Scaled or summed adapters kept ready: clients choose scales, so their number has no other bound."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a name stands for. `source`: where the weights can be read again; None keeps them here."""

    digest: bytes
    source: Path | None
    is_pinned: bool


class AdapterShelf:
    """Adapters by name, at most `max_bytes` of them in memory (None: all).

    `check` raises AdapterError for an adapter that does not fit the device's bank. `read` reads a source again;
    without it nothing is evicted. `is_used(digest)` says that weights are leased, so that dropping them here would
    free nothing; it is asked from whichever thread puts or finds, while the shelf's lock is held.
    """

    def __init__(
        self,
        check: Callable[[Adapter], None],
        *,
        max_bytes: int | None = None,
        read: Callable[[Path], Adapter] | None = None,
        is_used: Callable[[bytes], bool] = lambda digest: False,
    ) -> None:
        self._check = check
        self._max_bytes = max_bytes
        self._read = read
        self._is_used = is_used
        self._lock = Lock()
        self._entries: dict[str, _Entry] = {}
        self._weights: OrderedDict[bytes, Adapter] = OrderedDict()  # unused for longest first
        self._combined: OrderedDict[tuple[tuple[bytes, float], ...], Adapter] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be asked for, in memory or not. Pure."""
        with self._lock:
            return tuple(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of the named weights in memory. Pure."""
        with self._lock:
            return self._num_bytes(self._weights.values())

    def get(self, name: str) -> Adapter | None:
        """The weights, if the name is known and they are in memory. Pure: not a use."""
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None else self._weights.get(entry.digest)

    def source(self, name: str) -> Path | None:
        """Where the weights of the name can be read again, if it is known and has a source. Pure."""
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None else entry.source

    def put(self, name: str, adapter: Adapter, source: Path | None = None, *, is_pinned: bool = False) -> None:
        """Know the adapter by this name from now on; one that had it is replaced for later requests. A pinned one is
        never evicted. Raises AdapterError, changing nothing, when it does not fit the bank or the bound."""
        self._check(adapter)
        entry = _Entry(adapter.digest, source, is_pinned)
        with self._lock:
            entries = self._entries | {name: entry}
            if not self._make_room(adapter, entries):
                raise AdapterError(
                    f"adapter {name!r} needs {adapter.num_bytes} bytes of host memory; of the {self._max_bytes} that "
                    "adapters may take, too many hold adapters that are pinned, in use or cannot be read again"
                )
            self._keep(adapter, entries)

    def pop(self, name: str) -> Adapter | None:
        """Forget the name; its weights, if they were in memory. Raises NotFoundError for an unknown name."""
        with self._lock:
            entry = self._entry(name)
            adapter = self._weights.get(entry.digest)
            self._forget({other: each for other, each in self._entries.items() if other != name})
            return adapter

    def find(self, sequence: Sequence) -> Adapter | None:
        """What the sequence's request asks for: None for the base model, the sum for several adapters. Reads evicted
        weights again.

        Raises NotFoundError for an unknown name, RequestError for a sum that cannot be, or weights that cannot be read.
        """
        uses = [(self._use(name), scale) for name, scale in sequence.request.adapters]
        if not uses:
            return None
        if len(uses) == 1 and uses[0][1] == 1.0:
            return uses[0][0]
        key = tuple((adapter.digest, scale) for adapter, scale in uses)
        with self._lock:
            if key in self._combined:
                self._combined.move_to_end(key)
                return self._combined[key]
        try:
            adapter = combine(uses)
            self._check(adapter)
        except ValueError as error:
            raise RequestError(str(error), "lora") from error
        with self._lock:
            self._combined[key] = adapter
            while len(self._combined) > MAX_COMBINED:
                self._combined.popitem(last=False)
        return adapter

    def _use(self, name: str) -> Adapter:
        with self._lock:
            entry = self._entry(name)
            adapter = self._weights.get(entry.digest)
            if adapter is not None:
                self._weights.move_to_end(entry.digest)
                return adapter
        adapter = self._read_again(name, entry)
        with self._lock:
            # The name may mean something else by now, and there may be no room: then the lease alone keeps the weights.
            if self._entries.get(name) == entry and self._make_room(adapter, self._entries):
                self._keep(adapter, self._entries)
        return adapter

    def _read_again(self, name: str, entry: _Entry) -> Adapter:
        assert self._read is not None
        assert entry.source is not None
        try:
            adapter = self._read(entry.source)
        except AdapterError as error:
            raise RequestError(f"adapter {name!r} cannot be read again: {error}", "lora") from error
        if adapter.digest != entry.digest:
            raise RequestError(f"adapter {name!r} has changed in {entry.source} since it was loaded", "lora")
        return adapter

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            known = ", ".join(map(repr, sorted(self._entries))) or "none"
            raise NotFoundError(f"adapter {name!r} is not loaded here; loaded: {known}", "lora")
        return self._entries[name]

    def _keep(self, adapter: Adapter, entries: dict[str, _Entry]) -> None:
        self._weights.setdefault(adapter.digest, adapter)
        self._weights.move_to_end(adapter.digest)
        self._forget(entries)

    def _forget(self, entries: dict[str, _Entry]) -> None:
        """Let `entries` be all that is known; weights that no name means any more go, and what was made of them."""
        self._entries = entries
        named = {entry.digest for entry in entries.values()}
        for digest in [digest for digest in self._weights if digest not in named]:
            del self._weights[digest]
        for key in [key for key in self._combined if not named.issuperset(digest for digest, _scale in key)]:
            del self._combined[key]

    def _make_room(self, adapter: Adapter, entries: dict[str, _Entry]) -> bool:
        """Evict what `entries` let go, unused for longest first, until `adapter` fits. False, and nothing evicted, when
        it cannot fit."""
        if self._max_bytes is None or adapter.digest in self._weights:
            return True
        named = {entry.digest for entry in entries.values()}
        staying = {digest: each for digest, each in self._weights.items() if digest in named}
        evicted = []
        for digest in list(staying):
            if self._num_bytes(staying.values()) + adapter.num_bytes <= self._max_bytes:
                break
            if self._can_evict(digest, entries.values()):
                del staying[digest]
                evicted.append(digest)
        if self._num_bytes(staying.values()) + adapter.num_bytes > self._max_bytes:
            return False
        for digest in evicted:
            del self._weights[digest]
        return True

    def _can_evict(self, digest: bytes, entries: Iterable[_Entry]) -> bool:
        mine = [entry for entry in entries if entry.digest == digest]
        can_be_read = self._read is not None and all(entry.source is not None for entry in mine)
        return can_be_read and not any(entry.is_pinned for entry in mine) and not self._is_used(digest)

    @staticmethod
    def _num_bytes(adapters: Iterable[Adapter]) -> int:
        return sum(adapter.num_bytes for adapter in adapters)
