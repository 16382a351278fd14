"""Commands to a running engine that are no requests.

Owns: Control: what each command does, in which order commands take effect, and the one reply to each.
Must not know: sockets, steps.
Invariant: every command gets one Replied, in the order they came in; a command that fails has changed nothing.
"""

from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from izh.engine.messages import LoadAdapter, Replied, UnloadAdapter
from izh.errors import AdapterError, IzhError


class AdapterLibrary(Protocol):
    """Adapters by name: what `Control` asks of them (izh/adapters/shelf.py has it)."""

    @property
    def sources(self) -> dict[str, Path]:
        """All names, and where each adapter was read from."""

    def read(self, source: Path) -> Future[Any]:
        """Begin to read a directory."""

    def check_name(self, name: str, *, replace: bool = False) -> None:
        """Raise AdapterError when nothing can be put under this name."""

    def put(self, name: str, adapter: Any, source: Path, *, replace: bool = False) -> None:
        """Know what was read by this name. Raises AdapterError."""

    def pop(self, name: str) -> None:
        """Forget the name. Raises NotFoundError, AdapterInUseError."""


@dataclass(slots=True)
class _Pending:
    """A command, and for a load what is being read."""

    command: LoadAdapter | UnloadAdapter
    weights: Future[Any] | None = None


class Control:
    """Carries out commands on the engine's thread; files are read in the shelf's own meanwhile."""

    def __init__(self, adapters: AdapterLibrary | None) -> None:
        self._adapters = adapters
        self._pending: deque[_Pending] = deque()

    @property
    def is_busy(self) -> bool:
        """True while a command has no reply yet."""
        return bool(self._pending)

    def add(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Begin a command."""
        pending = _Pending(command)
        if isinstance(command, LoadAdapter) and self._adapters is not None:
            pending.weights = self._adapters.read(Path(command.directory))
        self._pending.append(pending)

    def wait(self) -> list[Replied]:
        """Finish all commands, waiting for the files that are read."""
        wait([pending.weights for pending in self._pending if pending.weights is not None])
        return self.replies()

    def replies(self) -> list[Replied]:
        """Finish the commands that can be, up to the first whose files are still being read."""
        done = []
        while self._pending and (self._pending[0].weights is None or self._pending[0].weights.done()):
            done.append(self._finish(self._pending.popleft()))
        return done

    def _finish(self, pending: _Pending) -> Replied:
        error: IzhError | None = None
        try:
            self._carry_out(pending)
        except IzhError as caught:
            error = caught
        known = {} if self._adapters is None else self._adapters.sources
        return Replied(
            call_id=pending.command.call_id,
            adapters={name: str(directory) for name, directory in known.items()},
            error=None if error is None else str(error),
            kind=None if error is None else type(error).__name__,
        )

    def _carry_out(self, pending: _Pending) -> None:
        command = pending.command
        if self._adapters is None:
            raise AdapterError("this engine was started without adapters; start it with --lora or --allow-runtime-lora")
        if isinstance(command, UnloadAdapter):
            self._adapters.pop(command.name)
            return
        self._adapters.check_name(command.name, replace=command.replace)  # before what is wrong with the files
        assert pending.weights is not None
        adapter = pending.weights.result()
        self._adapters.put(command.name, adapter, Path(command.directory), replace=command.replace)
