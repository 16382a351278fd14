"""The adapters that this engine knows by name, on the host.

Owns: AdapterShelf: name -> weights, and what a request's list of names and scales comes to.
Must not know: slots, the scheduler. A sequence that leased weights keeps them, whatever happens to their name here.
"""

from collections.abc import Callable

from izh.adapters.weights import Adapter, combine
from izh.errors import NotFoundError, RequestError
from izh.sequence import Sequence


class AdapterShelf:
    """`check` raises AdapterError for an adapter that does not fit the device's bank."""

    def __init__(self, check: Callable[[Adapter], None]) -> None:
        self._check = check
        self._adapters: dict[str, Adapter] = {}
        self._combined: dict[tuple[tuple[bytes, float], ...], Adapter] = {}

    def put(self, name: str, adapter: Adapter) -> None:
        """Know the adapter by this name from now on; one that had it is replaced for later requests. Raises
        AdapterError, changing nothing, when it does not fit."""
        self._check(adapter)
        self._adapters[name] = adapter

    def find(self, sequence: Sequence) -> Adapter | None:
        """What the sequence's request asks for: None for the base model, the sum for several adapters.

        Raises NotFoundError for an unknown name, RequestError for a sum that cannot be.
        """
        uses = []
        for name, scale in sequence.request.adapters:
            if name not in self._adapters:
                known = ", ".join(map(repr, sorted(self._adapters))) or "none"
                raise NotFoundError(f"adapter {name!r} is not loaded here; loaded: {known}", "lora")
            uses.append((self._adapters[name], scale))
        if not uses:
            return None
        key = tuple((adapter.digest, scale) for adapter, scale in uses)
        if key not in self._combined:
            try:
                adapter = combine(uses)
                self._check(adapter)
            except ValueError as error:
                raise RequestError(str(error), "lora") from error
            self._combined[key] = adapter
        return self._combined[key]
