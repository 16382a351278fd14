"""Encoder outputs that may be needed again.

Owns: a store of rows by key, bounded in bytes, the least recently used leaving first; counts for metrics.
Must not know: images, encoders; a key is a digest of all that its rows depend on.
Invariant: the rows held are never more than `max_bytes`. Safe to use from several threads.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Running totals, and what is held now."""

    hits: int
    misses: int
    num_entries: int
    num_bytes: int


class EncoderCache:
    """Rows by key. `max_bytes=0` keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._num_bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Tensor | None:
        """The rows stored under `key`, or None. They are shared: nobody may write into them."""
        rows = self.find(key)
        if rows is None:
            with self._lock:
                self._misses += 1
        return rows

    def find(self, key: bytes) -> Tensor | None:
        """As `get`, for whoever will ask again if there is nothing: only then it is a miss."""
        with self._lock:
            rows = self._entries.get(key)
            if rows is not None:
                self._hits += 1
                self._entries.move_to_end(key)
            return rows

    def put(self, key: bytes, rows: Tensor) -> None:
        """Keep a CPU copy of `rows`, unless it alone exceeds the bound. What is there under `key` already stays: equal
        keys mean equal rows."""
        size = _num_bytes(rows)
        if size > self.max_bytes:
            return
        copy = rows.detach().to("cpu", copy=True)  # not a view: it must not keep a batch of other images alive
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = copy
            self._num_bytes += size
            while self._num_bytes > self.max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._num_bytes -= _num_bytes(oldest)

    @property
    def counts(self) -> CacheCounts:
        with self._lock:
            return CacheCounts(self._hits, self._misses, len(self._entries), self._num_bytes)


def _num_bytes(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()
