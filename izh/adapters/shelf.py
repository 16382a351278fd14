"""The adapters that this engine knows by name, on the host.

Owns: AdapterShelf: name -> weights within a bound in bytes, and what a request's list of names and scales comes to.
Must not know: slots, the scheduler, file formats. A sequence that leased weights keeps them, whatever happens here.
Invariants: a name means the same weights until it is put again; weights under several names are kept once; only what
can be had again is evicted.

    put --> in memory --evicted, unused for longest--> known by name, digest, source --read again by find--> in memory

Reading, fitting, summing and hashing run in one thread of the shelf's own, so that no step waits for them. All else,
the tables included, belongs to the engine's thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from izh.adapters.gate import Loan
from izh.adapters.weights import Adapter, combine
from izh.errors import AdapterError, AdapterInUseError, NotFoundError, RequestError
from izh.sequence import Sequence

_Sum = tuple[tuple[bytes, float], ...]  # (digest, scale) of each adapter summed


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a name stands for, and where its weights can be read again."""

    digest: bytes
    source: Path


class AdapterShelf:
    """Adapters by name, at most `max_bytes` of them in memory.

    `read` makes an adapter of a directory, `fit` makes it ready for the device's bank or raises AdapterError.
    `num_leases(digest, name)` tells how many live sequences use weights, by that name or (None) by any: dropping those
    here would free nothing.
    """

    def __init__(
        self,
        read: Callable[[Path], Adapter],
        fit: Callable[[Adapter], Adapter],
        *,
        max_bytes: int,
        num_leases: Callable[[bytes, str | None], int] = lambda digest, name: 0,
    ) -> None:
        self._read = read
        self._fit = fit
        self._max_bytes = max_bytes
        self._num_leases = num_leases
        self._entries: dict[str, _Entry] = {}
        self._memory: OrderedDict[bytes | _Sum, Adapter] = OrderedDict()  # unused for longest first
        self._making: dict[bytes | _Sum, Future[Adapter]] = {}  # to be in memory soon
        # One thread of torch: the others are the steps'.
        self._worker = ThreadPoolExecutor(1, "adapters", initializer=torch.set_num_threads, initargs=(1,))

    @property
    def sources(self) -> dict[str, Path]:
        """All that can be asked for, in memory or not, and where each was read from. Pure."""
        return {name: entry.source for name, entry in self._entries.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, leased ones that are no longer kept here excluded. Pure."""
        return sum(adapter.num_bytes for adapter in self._memory.values())

    def digest(self, name: str) -> bytes:
        """What the name means now. Raises NotFoundError for an unknown name."""
        return self._entry(name).digest

    def is_in_memory(self, name: str) -> bool:
        """Pure: not a use. Raises NotFoundError for an unknown name."""
        return self._entry(name).digest in self._memory

    def read(self, source: Path) -> Future[Adapter]:
        """Read and fit a directory; nothing is known by it yet. The future may hold an AdapterError."""
        return self._worker.submit(self._make, source)

    def put(self, name: str, adapter: Adapter, source: Path, *, replace: bool = False) -> None:
        """Know the adapter, which `read` made of `source`, by this name from now on. Requests that run keep what they
        leased. Raises AdapterError, changing nothing, for a name that is taken unless it is to be replaced, and when
        there is no room."""
        self.check_name(name, replace=replace)
        entries = self._entries | {name: _Entry(adapter.digest, source)}
        named = {entry.digest for entry in entries.values()}
        if not self._keep(adapter.digest, adapter, named):
            raise AdapterError(
                f"adapter {name!r} needs {adapter.num_bytes} bytes of host memory; of the {self._max_bytes} that "
                "adapters may take, too many are in use by requests; raise --lora-host-gb or try again later"
            )
        self._know(entries)

    def check_name(self, name: str, *, replace: bool = False) -> None:
        """Raises AdapterError when nothing can be put under this name."""
        if name in self._entries and not replace:
            raise AdapterError(f"adapter {name!r} is loaded already; unload it first, or replace it (load_inplace)")

    def pop(self, name: str) -> None:
        """Forget the name. Raises NotFoundError for an unknown one, AdapterInUseError while requests use it."""
        if live := self._num_leases(self._entry(name).digest, name):
            raise AdapterInUseError(
                f"adapter {name!r} is in use by {live} live requests; unload it when they have ended"
            )
        self._know({other: each for other, each in self._entries.items() if other != name})

    def find(self, sequence: Sequence) -> Loan | None:
        """What the sequence's request asks for: None for the base model, the sum for several adapters or for a scale.

        Raises NotFoundError for an unknown name. The weights' future may hold a RequestError: a sum that cannot be, an
        evicted adapter that cannot be read again or has changed.
        """
        uses = [(name, self._entry(name), scale) for name, scale in sequence.request.adapters]
        if not uses:
            return None
        self._keep_what_is_made()
        alone = len(uses) == 1 and uses[0][2] == 1.0
        key: bytes | _Sum = uses[0][1].digest if alone else tuple((entry.digest, scale) for _, entry, scale in uses)
        weights = self._weights(key)
        if weights is None:
            parts = [(self._of_name(name, entry), scale) for name, entry, scale in uses]
            weights = parts[0][0] if alone else self._worker.submit(self._sum, parts)
            self._making[key] = weights
        return Loan(tuple((name, entry.digest) for name, entry, _scale in uses), weights)

    # -- in the worker's thread ---------------------------------------------------------------------------------------

    def _make(self, source: Path) -> Adapter:
        return _hashed(self._fit(self._read(source)))

    def _make_again(self, name: str, entry: _Entry) -> Adapter:
        try:
            adapter = self._make(entry.source)
        except AdapterError as error:
            raise RequestError(f"adapter {name!r} cannot be read again: {error}", "lora") from error
        if adapter.digest != entry.digest:
            raise RequestError(f"adapter {name!r} has changed in {entry.source} since it was loaded", "lora")
        return adapter

    def _sum(self, parts: list[tuple[Future[Adapter], float]]) -> Adapter:
        """The parts were submitted earlier to this one thread, so none of them is waited for."""
        try:
            adapter = self._fit(combine([(weights.result(), scale) for weights, scale in parts]))
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(str(error), "lora") from error
        return _hashed(adapter)

    # -- the tables ---------------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise _not_loaded(name, self._entries)
        return self._entries[name]

    def _weights(self, key: bytes | _Sum) -> Future[Adapter] | None:
        """What is in memory, or on its way there."""
        if key not in self._memory:
            return self._making.get(key)
        self._memory.move_to_end(key)
        ready: Future[Adapter] = Future()
        ready.set_result(self._memory[key])
        return ready

    def _of_name(self, name: str, entry: _Entry) -> Future[Adapter]:
        weights = self._weights(entry.digest)
        if weights is None:
            weights = self._making[entry.digest] = self._worker.submit(self._make_again, name, entry)
        return weights

    def _keep_what_is_made(self) -> None:
        named = {entry.digest for entry in self._entries.values()}
        for key, weights in tuple(self._making.items()):
            if weights.done():
                del self._making[key]
                # The name may mean something else by now, and there may be no room: then the leases alone keep it.
                if weights.exception() is None and named.issuperset(_digests(key)):
                    self._keep(key, weights.result(), named)

    def _know(self, entries: dict[str, _Entry]) -> None:
        """Let `entries` be all that is known; weights that no name means any more go, and sums made of them."""
        self._entries = entries
        named = {entry.digest for entry in entries.values()}
        for key in [key for key in self._memory if not named.issuperset(_digests(key))]:
            del self._memory[key]

    def _keep(self, key: bytes | _Sum, adapter: Adapter, named: set[bytes]) -> bool:
        """Have the adapter in memory, evicting what is unused for longest; what no name in `named` means goes without
        being counted. False, and nothing evicted, when there is no room."""
        if key not in self._memory:
            staying = {other: each for other, each in self._memory.items() if named.issuperset(_digests(other))}
            excess = sum(each.num_bytes for each in (*staying.values(), adapter)) - self._max_bytes
            evicted = []
            for other, each in staying.items():
                if excess <= 0:
                    break
                if not any(self._num_leases(digest, None) for digest in _digests(other)):
                    evicted.append(other)
                    excess -= each.num_bytes
            if excess > 0:
                return False
            for other in evicted:
                del self._memory[other]
            self._memory[key] = adapter
        self._memory.move_to_end(key)
        return True


def find_no_adapter(sequence: Sequence) -> None:
    """The `find` of an engine without adapters. Raises NotFoundError for every name."""
    for name, _scale in sequence.request.adapters:
        raise _not_loaded(name, ())


def _not_loaded(name: str, loaded: Iterable[str]) -> NotFoundError:
    known = ", ".join(map(repr, sorted(loaded))) or "none"
    return NotFoundError(f"adapter {name!r} is not loaded here; loaded: {known}", "lora")


def _digests(key: bytes | _Sum) -> Iterable[bytes]:
    return (key,) if isinstance(key, bytes) else (digest for digest, _scale in key)


def _hashed(adapter: Adapter) -> Adapter:
    """The same, with its digest worked out here rather than where it is first asked for."""
    assert adapter.digest
    return adapter
